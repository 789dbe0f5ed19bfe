"""`stream_interval`: fewer events, the same answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.running_service import MODEL, RunningService
from tests.support.sse_readers import payloads

WORDS = "one two three four five six seven eight nine ten"
PARAMS: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "ignore_eos": True}
USER = [{"role": "user", "content": WORDS}]
SHOWN = {"return_token_ids": True, "stream_options": {"include_usage": True}}
CHAT = ("/v1/chat/completions", {**PARAMS, **SHOWN, "messages": USER, "logprobs": True})
COMPLETION = ("/v1/completions", {**PARAMS, **SHOWN, "prompt": WORDS, "logprobs": 1})


def events_of(service: RunningService, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
    params = {**body, "stream": True, **more}
    answer = httpx.post(service.base_url + path, json=params, timeout=20)
    assert answer.status_code == 200, answer.text
    return payloads(answer.content)


def sizes_of(events: list[Any], choice: int = 0) -> list[int]:
    """How many tokens each event with any has."""
    members = [one for event in events for one in event.get("choices", ())]
    sizes = [len(one.get("token_ids") or ()) for one in members if one["index"] == choice]
    return [size for size in sizes if size]


def joined(events: list[Any], choice: int = 0) -> tuple[str, list[int], list[Any]]:
    text, ids, logprobs = "", [], []
    for event in events:
        for one in event.get("choices", ()):
            if one["index"] == choice:
                text += one.get("text") or one.get("delta", {}).get("content") or ""
                ids += one.get("token_ids") or []
                entries = one.get("logprobs") or {}
                logprobs += entries.get("content") or entries.get("tokens") or []
    return text, ids, logprobs


@pytest.mark.promise(
    "Runtime: a stream interval for each request (the first token of a choice comes at once, so "
    "100 tokens in eights are 14 events)"
)
@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
def test_events_are_fewer_and_add_up_to_the_same(
    service: RunningService, path: str, body: dict[str, Any]
) -> None:
    every, eighth = (
        events_of(service, path, body),
        events_of(service, path, body, stream_interval=8),
    )
    assert joined(eighth) == joined(every)
    sizes = sizes_of(eighth)
    assert sizes[0] == sizes_of(every)[0] <= 2, "the first text at once"
    assert all(size >= 8 for size in sizes[1:-1])
    assert sum(sizes) == 40
    assert len(sizes) <= 2 + 39 // 8
    assert eighth[-1]["usage"] == every[-1]["usage"]
    finals = [one for event in eighth for one in event["choices"] if one["finish_reason"]]
    assert [one["finish_reason"] for one in finals] == ["length"]


def test_each_prompt_is_gathered_by_itself(service: RunningService) -> None:
    body = {**COMPLETION[1], "prompt": [WORDS, "eleven twelve thirteen"]}
    every = events_of(service, COMPLETION[0], body)
    eighth = events_of(service, COMPLETION[0], body, stream_interval=8)
    for choice in range(2):
        assert joined(eighth, choice) == joined(every, choice)
        assert sizes_of(eighth, choice)[0] == sizes_of(every, choice)[0]
        assert sum(sizes_of(eighth, choice)) == 40
        assert len(sizes_of(eighth, choice)) <= 2 + 39 // 8


def test_the_native_dialect_and_messages_know_it_too(service: RunningService) -> None:
    body = {"prompt": WORDS, "max_tokens": 40, "ignore_eos": True}
    events = events_of(service, "/generate", body, stream_interval=16)
    sizes = [len(event["token_ids"]) for event in events]
    assert (sizes[0], sum(sizes)) == (1, 40)
    assert len(events) <= 5
    assert events[-1]["full_text"] == "".join(event["text"] for event in events)
    message = {"model": MODEL, "max_tokens": 20, "messages": USER}
    texts = []
    for more in ({}, {"stream_interval": 5}):
        result = events_of(service, "/v1/messages", message, **more)
        deltas = [event["delta"] for event in result if event["type"] == "content_block_delta"]
        texts.append([delta["text"] for delta in deltas])
    assert "".join(texts[0]) == "".join(texts[1])
    assert len(texts[1]) <= 5 < len(texts[0])


def test_a_stream_that_fails_sends_what_it_held(service: RunningService) -> None:
    service.script.stop_after = 6
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.NONFINITE_LOGITS, Usage(5, 6), message="not a number"
    )
    body = {"prompt": WORDS, "max_tokens": 40, "ignore_eos": True}
    *output, error = events_of(service, "/generate", body, stream_interval=100)
    assert error["error"]["code"] == "nonfinite_logits"
    assert sum(len(event["token_ids"]) for event in output) == 6


def test_a_stream_that_holds_its_tokens_is_kept_alive(service: RunningService) -> None:
    service.script.step_s = 0.05
    body = {"prompt": WORDS, "max_tokens": 20, "stream_interval": 100, "ignore_eos": True}
    received = httpx.post(f"{service.base_url}/generate", json=body, timeout=20).content
    first = received.index(b"data: ")
    assert received.count(b": ka\n\n", first) >= 2


@pytest.mark.parametrize(
    ("more", "status"),
    [({}, 200), ({"stream_interval": 0}, 400), ({"stream_interval": 5000}, 400)],
)
def test_it_is_bounded_and_for_streams_alone(
    service: RunningService, more: dict[str, Any], status: int
) -> None:
    for path, body in (CHAT, COMPLETION):
        params = {**body, "stream": True, **more}
        answer = httpx.post(service.base_url + path, json=params, timeout=20)
        assert answer.status_code == status
        without = {**body, "stream": False, "stream_options": None, "stream_interval": 8}
        refused = httpx.post(service.base_url + path, json=without, timeout=20)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_interval")
