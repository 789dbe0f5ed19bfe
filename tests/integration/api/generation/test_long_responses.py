"""Answers that are long: sent in chunks, the same as their streams."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.support.batches import batch_of
from tests.support.running_service import MODEL, RunningService
from tests.support.service_fixtures import module_service
from tests.support.sse_readers import payloads

LONG = {"max_tokens": 400, "ignore_eos": True}  # with twenty alternatives each: half a megabyte
MESSAGES = [{"role": "user", "content": "water"}]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "logprobs": True,
    "top_logprobs": 20,
    **LONG,
}

shared_service = module_service(keepalive_s=0.1)


def spelled(entries: list[Any]) -> str:
    """The text of log probabilities, whose tokens the worker gives -0.5 each."""
    assert {entry["logprob"] for entry in entries} <= {-0.5}
    return "".join(entry["token"] for entry in entries if not entry["token"].startswith("<|"))


@pytest.mark.promise(
    "Streaming: a long response does not block the event loop, and its size is limited by its "
    "request"
)
@pytest.mark.parametrize("tokens_per_step", [1, 300])
def test_a_long_chat_answer_comes_in_chunks_and_is_its_stream(
    client: httpx.Client, service: RunningService, tokens_per_step: int
) -> None:
    service.script.tokens_per_step = tokens_per_step
    whole = client.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == 200, whole.text[:500]
    assert "content-length" not in whole.headers
    assert len(whole.content) > 100_000
    stream = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    (choice,) = whole.json()["choices"]
    text, entries = "", []
    for event in payloads(stream.content):
        for part in event["choices"]:
            text += part["delta"].get("content", "")
            entries += (part["logprobs"] or {"content": []})["content"]
    assert choice["message"]["content"] == text
    assert choice["logprobs"]["content"] == entries
    assert len(entries) == LONG["max_tokens"]
    assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
    assert spelled(entries) == text


def test_a_long_completion_comes_in_chunks_and_is_its_stream(
    client: httpx.Client, service: RunningService
) -> None:
    params = {"model": MODEL, "prompt": ["water", "fire", "air"], "logprobs": 5, **LONG}
    whole = client.post("/v1/completions", json=params)
    assert whole.status_code == 200, whole.text[:500]
    assert "content-length" not in whole.headers
    stream = client.post("/v1/completions", json={**params, "stream": True})
    for choice in whole.json()["choices"]:
        parts = [
            part
            for event in payloads(stream.content)
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert choice["text"] == "".join(part["text"] for part in parts)
        for name, values in choice["logprobs"].items():
            assert values == [
                one for part in parts for one in (part["logprobs"] or {name: []})[name]
            ]
            assert len(values) == LONG["max_tokens"]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * LONG["max_tokens"]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_a_long_response_is_the_same_whole_streamed_stored_and_replayed(
    client: httpx.Client,
) -> None:
    params = {
        "model": MODEL,
        "input": "water",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 20,
        "max_output_tokens": 400,
        "ignore_eos": True,
    }
    whole = client.post("/v1/responses", json=params)
    assert whole.status_code == 200, whole.text[:500]
    assert "content-length" not in whole.headers
    stored = client.get(f"/v1/responses/{whole.json()['id']}")
    assert stored.json() == whole.json()
    stream = client.post("/v1/responses", json={**params, "stream": True})
    last = payloads(stream.content)[-1]["response"]
    again = client.get(f"/v1/responses/{last['id']}", params={"stream": "true"})
    assert payloads(again.content) == payloads(stream.content)
    for one in (whole.json(), last):
        (part,) = one["output"][0]["content"]
        assert len(part["logprobs"]) == 400
        assert part["logprobs"] == last["output"][0]["content"][0]["logprobs"]
        assert spelled(part["logprobs"]) == part["text"]
    deltas = [event for event in payloads(stream.content) if "delta" in event]
    assert [spelled(delta["logprobs"]) for delta in deltas] == [delta["delta"] for delta in deltas]


def test_an_old_client_gets_a_long_answer_until_the_connection_ends(
    service: RunningService,
) -> None:
    body = json.dumps(CHAT).encode()
    with service.connect() as made:
        head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        made.sendall(head + body)
        received = b"".join(iter(lambda: made.recv(65_536), b""))
    head, _, answer = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    (choice,) = json.loads(answer)["choices"]
    assert len(choice["logprobs"]["content"]) == LONG["max_tokens"]


def test_a_client_that_reads_slowly_gets_all_of_a_long_answer(client: httpx.Client) -> None:
    received = b""
    with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        for chunk in answer.iter_raw(65_536):
            received += chunk
            time.sleep(0.05)
    (choice,) = json.loads(received)["choices"]
    assert len(choice["logprobs"]["content"]) == LONG["max_tokens"]


def test_a_row_of_a_batch_has_a_long_answer(client: httpx.Client) -> None:
    output = batch_of(client, {**CHAT}, "output_file_id")
    (choice,) = output["response"]["body"]["choices"]
    assert len(choice["logprobs"]["content"]) == LONG["max_tokens"]
