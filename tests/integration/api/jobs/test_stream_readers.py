"""Streams with keep-alives before their first token, read as the standard has it and as many do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from bench.load_client import completions, new_session
from bench.workloads import Seen, Work
from tests.support.dialects import DIALECTS, Dialect
from tests.support.lazy_import import lazy_import
from tests.support.running_service import MODEL, RunningService
from tests.support.sse_readers import by_blank_lines, by_lines

anthropic = lazy_import("anthropic")

USER = [{"role": "user", "content": "one two three"}]
PLAIN_ROUTES = [
    (DIALECTS["chat"], "one two three"),
    (DIALECTS["completions"], "one two three"),
    (DIALECTS["completions"], ["one two", "three"]),
    (DIALECTS["generate"], "one two three"),
]


def late_stream(
    service: RunningService,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    step_s: float = 0.02,
) -> list[bytes]:
    """What the socket gave, read by read, of a stream whose tokens come after keep-alives."""
    service.script.step_s = step_s
    service.script.starts = False
    reads: list[bytes] = []
    with httpx.stream(method, service.base_url + path, json=body, timeout=20) as response:
        assert response.status_code == 200
        for read in response.iter_raw():
            reads.append(read)
            if sum(part.count(b": ka") + part.count(b"ping") for part in reads) >= 2:
                service.script.starts = True
    return reads


@pytest.mark.promise(
    "Clients: clients that read lines and clients that split at blank lines see the same events"
)
@pytest.mark.parametrize(("dialect", "prompt"), PLAIN_ROUTES)
def test_no_habit_of_reading_loses_an_event_behind_a_keepalive(
    service: RunningService, dialect: Dialect, prompt: Any
) -> None:
    body = dialect.body(prompt, max_tokens=12, stream=True)
    reads = late_stream(service, "POST", dialect.path, body)
    assert any(read == b": ka\n\n" for read in reads), "a comment comes in a read of its own"
    expected = list(by_lines(reads))
    assert expected[-1] == "[DONE]"
    assert sum('"text"' in data or '"content"' in data for data in expected) >= 12
    assert list(by_blank_lines(reads, strips=False)) == expected
    assert list(by_blank_lines(reads, strips=True)) == expected


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_named_events_are_found_by_lines_and_by_blank_lines(
    service: RunningService, name: str
) -> None:
    body = DIALECTS[name].body("one two three", max_tokens=12, stream=True)
    reads = late_stream(service, "POST", DIALECTS[name].path, body)
    expected = list(by_lines(reads))
    assert json.loads(expected[-1])["type"] in (
        "message_stop",
        "response.completed",
        "response.incomplete",
    )
    assert list(by_blank_lines(reads, strips=False)) == expected


def test_once_an_id_was_sent_a_comment_is_no_event_of_its_own(service: RunningService) -> None:
    """OpenAI's Python SDK makes an empty event of a blank line, once it has seen an id."""
    service.script.starts = False
    body = {"prompt": "one two three", "max_tokens": 6, "on_disconnect": "continue"}
    with httpx.stream("POST", f"{service.base_url}/generate", json=body, timeout=20) as response:
        job_id = response.headers["x-request-id"]
    between_tokens_s = 0.25  # so that there are keep-alives behind ids
    reads = late_stream(service, "GET", f"/v1/jobs/{job_id}/stream", None, between_tokens_s)
    text = b"".join(reads).decode()
    before, _, behind = text.partition("\nid: ")
    assert before.startswith(": ka\n\n")
    assert ": ka\n" in behind
    assert ": ka\n\n" not in behind
    assert ":\n\n" not in behind
    expected = list(by_lines(reads))
    output = [json.loads(data) for data in expected[:-1]]
    assert sum(len(event["token_ids"]) for event in output) == 6


def test_the_sdks_read_over_keepalives(service: RunningService) -> None:
    params: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    base_url = f"{service.base_url}/v1"
    plain: Any = openai.OpenAI(base_url=base_url, api_key="any")
    messages: Any = anthropic.Anthropic(base_url=service.base_url, api_key="any")
    whole = plain.chat.completions.create(messages=USER, **params).choices[0].message.content
    spoken = plain.completions.create(prompt="one two three", **params).choices[0].text
    service.script.step_s = 0.25  # a keep-alive or two between tokens
    chat = plain.chat.completions.create(messages=USER, stream=True, **params)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == whole
    completion = plain.completions.create(prompt="one two three", stream=True, **params)
    assert "".join(chunk.choices[0].text for chunk in completion) == spoken
    with messages.messages.stream(messages=USER, **params) as stream:
        assert "".join(stream.text_stream) == whole
    response = {"model": MODEL, "input": "one two three", "max_output_tokens": 16}
    events = list(plain.responses.create(stream=True, **response))
    assert events[-1].type in ("response.completed", "response.incomplete")
    for client in (plain, messages):
        client.close()


def test_the_bench_client_that_reads_as_vllms_gets_every_token(service: RunningService) -> None:
    """It raises where a token was lost."""
    service.script.step_s = 0.02
    service.script.starts = False
    work = Work(tuple(service.text.tokenizer.encode("one two three")), 12)

    async def run() -> Seen:
        seen = Seen(len(work.prompt))

        def start() -> None:
            service.script.starts = True

        async with new_session() as session:
            asyncio.get_running_loop().call_later(0.5, start)  # behind keep-alives
            await completions(session, service.base_url, MODEL, by_blank_lines=True)(work, seen)
        return seen

    seen = asyncio.run(run())
    assert seen.num_out == 12
    assert len(seen.times) >= 10
