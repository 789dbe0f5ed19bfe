"""Idempotency keys: a request that is sent again is the same request."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.support.running_service import MODEL, RunningService, wait_until

PROMPT = {"prompt": "a gate and a wheel 😀 ", "max_tokens": 30}
WHOLE = {**PROMPT, "stream": False}


@pytest.fixture
def key(request: pytest.FixtureRequest) -> dict[str, str]:
    """A header that no other test sends."""
    return {"idempotency-key": f"{request.node.name} {id(request)}"}


def stream(client: httpx.Client, headers: dict[str, str], **more: Any) -> list[dict[str, Any]]:
    body = {**PROMPT, **more}
    with connect_sse(client, "POST", "/generate", json=body, headers=headers) as source:
        return [json.loads(event.data) for event in source.iter_sse() if event.data != "[DONE]"]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events)


def test_a_running_answer_is_joined_from_its_start(
    client: httpx.Client,
    service: RunningService,
    key: dict[str, str],
) -> None:
    service.script.step_s = 0.02
    begun = threading.Event()

    def first() -> list[dict[str, Any]]:
        with (
            httpx.Client(base_url=service.base_url, timeout=20) as own,
            connect_sse(own, "POST", "/generate", json=PROMPT, headers=key) as source,
        ):
            events = []
            for event in source.iter_sse():
                if event.data != "[DONE]":
                    events.append(json.loads(event.data))
                begun.set()
            return events

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first)
        assert begun.wait(20)
        joined = stream(client, key)
        theirs = running.result(30)
    assert joined[0]["id"] == theirs[0]["id"]
    assert text_of(joined) == text_of(theirs) == theirs[-1]["full_text"]
    assert len(service.worker.seen) == 1


@pytest.mark.promise(
    "Access: a request repeated with its idempotency key is the same job, at any frontend (ten "
    "minutes after its end)"
)
def test_many_at_once_are_one_job(service: RunningService, key: dict[str, str]) -> None:
    service.script.step_s = 0.005

    def send(_: int) -> list[dict[str, Any]]:
        with httpx.Client(base_url=service.base_url, timeout=20) as own:
            return stream(own, key)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    assert len({answer[0]["id"] for answer in answers}) == 1
    assert len({text_of(answer) for answer in answers}) == 1
    assert len(service.worker.seen) == 1


def test_after_a_lost_connection_the_key_finds_the_job(
    client: httpx.Client,
    service: RunningService,
    key: dict[str, str],
) -> None:
    service.script.step_s = 0.02
    with client.stream("POST", "/generate", json=PROMPT, headers=key) as leaving:
        name = leaving.headers["x-request-id"]
        next(leaving.iter_raw())
    again = stream(client, key)
    assert again[0]["id"] == name
    assert again[-1]["finish_reason"] == "length"
    assert client.get(f"/v1/jobs/{name}").json()["status"] == "finished"
    assert len(service.worker.seen) == 1


def test_what_failed_is_tried_again_as_another_job(
    client: httpx.Client,
    service: RunningService,
    key: dict[str, str],
) -> None:
    service.script.step_s = 0.5
    with client.stream("POST", "/generate", json=PROMPT, headers=key) as running:
        first = running.headers["x-request-id"]
        client.delete(f"/v1/jobs/{first}")
    service.script.step_s = 0
    second = stream(client, key)
    assert second[0]["id"] != first
    assert second[-1]["done"]
    assert stream(client, key)[0]["id"] == second[0]["id"]


def test_a_refused_request_takes_no_key(client: httpx.Client, key: dict[str, str]) -> None:
    refused = client.post("/generate", json={**WHOLE, "max_tokens": -1}, headers=key)
    assert refused.status_code == 400
    assert client.post("/generate", json=WHOLE, headers=key).status_code == 200


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\tb", "é"])
def test_an_invalid_key_is_refused(client: httpx.Client, bad: str) -> None:
    refused = client.post("/generate", json=WHOLE, headers={"idempotency-key": bad.encode()})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


def test_every_prompt_of_a_list_keeps_its_job(
    client: httpx.Client,
    service: RunningService,
    key: dict[str, str],
) -> None:
    body = {"model": MODEL, "prompt": ["a gate", "a wheel", "water"], "max_tokens": 6}
    first, again = (client.post("/v1/completions", json=body, headers=key) for _ in range(2))
    assert first.json()["job_ids"] == again.json()["job_ids"]
    assert first.json()["choices"] == again.json()["choices"]
    assert len(service.worker.seen) == 3


def test_routes_that_make_no_job_ignore_the_key(client: httpx.Client, key: dict[str, str]) -> None:
    for text in ("a", "b"):
        body = {"model": MODEL, "prompt": text}
        assert client.post("/tokenize", json=body, headers=key).status_code == 200


def test_a_background_response_is_made_once(
    client: httpx.Client,
    service: RunningService,
    key: dict[str, str],
) -> None:
    body = {"model": MODEL, "input": "water and iron", "background": True, "max_output_tokens": 9}
    first, again = (client.post("/v1/responses", json=body, headers=key) for _ in range(2))
    assert first.status_code == 200
    assert first.json()["id"] == again.json()["id"]
    wait_until(
        lambda: (
            client.get(f"/v1/responses/{first.json()['id']}").json()["status"]
            in ("completed", "incomplete")
        ),
        "its end",
    )
    assert len(service.worker.seen) == 1
