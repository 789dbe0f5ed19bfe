"""Sends the workloads' requests to an OpenAI-compatible server and notes when text comes."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from tests.bench.workloads import Seen, Send, Work, clock

TIMEOUT_S = 900.0


def completions(session: aiohttp.ClientSession, base_url: str, model: str) -> Send:
    """POST /v1/completions with token ids, greedy and to full length, as a stream."""
    url = f"{base_url.rstrip('/')}/v1/completions"

    async def send(work: Work, seen: Seen) -> None:
        body = {
            "model": model,
            "prompt": work.prompt,
            "max_tokens": work.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = msgspec.json.encode(body)
        usage: dict[str, Any] = {}
        seen.start_s = clock()
        async with session.post(
            url, data=payload, headers={"content-type": "application/json"}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                now_s = clock()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                usage = event.get("usage") or usage
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    seen.times.append(now_s)
        seen.end_s = clock()
        seen.num_out = usage.get("completion_tokens") or len(seen.times)

    return send


def new_session() -> aiohttp.ClientSession:
    """A connection per request: some servers close kept ones at an unlucky moment."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )
