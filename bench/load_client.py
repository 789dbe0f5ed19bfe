"""Sends the workloads' requests to an OpenAI-compatible server and notes when text comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from bench.workloads import Seen, Send, Work, clock
from tests.support.sse_readers import BlankLineReader

TIMEOUT_S = 900.0


def completions(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str,
    *,
    by_blank_lines: bool = False,
    sampling: Mapping[str, object] | None = None,
) -> Send:
    """POST /v1/completions with token ids, greedy or by `sampling`, to full length, as a stream.

    `by_blank_lines`: the stream is read as `vllm bench serve` does, and a request that lost a token
    by it is an error. The server must know `return_token_ids`.
    """
    url = f"{base_url.rstrip('/')}/v1/completions"

    async def send(work: Work, seen: Seen) -> None:
        body: dict[str, Any] = {
            "model": model,
            "prompt": work.prompt,
            "max_tokens": work.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= sampling or {}
        if by_blank_lines:
            body["return_token_ids"] = True
        payload = msgspec.json.encode(body)
        usage: dict[str, Any] = {}
        seen.start_s = clock()
        async with session.post(
            url, data=payload, headers={"content-type": "application/json"}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
            events = _stripped_events(answer) if by_blank_lines else _event_lines(answer)
            num_token_ids = 0
            async for data in events:
                now_s = clock()
                if data == "[DONE]":
                    break
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                seen.answer_id = event.get("id") or seen.answer_id
                usage = event.get("usage") or usage
                choices = event.get("choices") or ()
                num_token_ids += sum(len(choice.get("token_ids") or ()) for choice in choices)
                if any(choice.get("text") for choice in choices):
                    seen.times.append(now_s)
            if by_blank_lines and num_token_ids != usage.get("completion_tokens"):
                raise RuntimeError(
                    f"{num_token_ids} of {usage.get('completion_tokens')} tokens came"
                )
        seen.end_s = clock()
        seen.num_out = usage.get("completion_tokens") or len(seen.times)

    return send


async def _event_lines(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yields the data of each event, line by line."""
    async for line in answer.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


async def _stripped_events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yields the data of each event that `vllm bench serve` would find."""
    reader = BlankLineReader(strips=True)
    async for read in answer.content.iter_any():
        for data in reader.push(read):
            yield data


def new_session() -> aiohttp.ClientSession:
    """A connection per request: some servers close kept ones at an unlucky moment."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )
