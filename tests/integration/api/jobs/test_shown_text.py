"""GET /v1/jobs/{id}/prompt and /answer: a job's text for whoever looks at it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.transport.wire import LOST_OUTPUT
from tests.support.expired_jobs import expire_text
from tests.support.running_service import MODEL, RunningService, wait_until

TEXT = "a gate 😀 and a wheel; "


def generated(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"prompt": TEXT, "max_tokens": 30, "ignore_eos": True, "stream": False, **more}
    answer: dict[str, Any] = client.post("/generate", json=body).json()
    return answer


@pytest.mark.parametrize("limit", [1, 7, 4096])
def test_the_pages_of_a_prompt_are_its_text(client: httpx.Client, limit: int) -> None:
    """A character of several tokens is in one page."""
    name = generated(client, prompt=4 * TEXT)["id"]
    parts, query = [], {"limit": limit, "after": 0}
    while True:
        page = client.get(f"/v1/jobs/{name}/prompt", params=query).json()
        assert page["missing"] is None
        parts.append(page["text"])
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert "".join(parts) == 4 * TEXT
    assert not any("\ufffd" in part for part in parts)
    assert page["num_tokens"] == client.get(f"/v1/jobs/{name}").json()["usage"]["prompt_tokens"]


def test_a_prompt_that_is_no_longer_stored_is_said_to_be(
    client: httpx.Client, service: RunningService
) -> None:
    name = generated(client)["id"]
    redis: Any = service.transport.connections.commands
    service.call(redis.delete(service.transport.keys.prompt(name.removeprefix("gen-"))))
    page = client.get(f"/v1/jobs/{name}/prompt").json()
    assert (page["text"], page["missing"], page["next"]) == (None, "not_stored", None)
    assert page["num_tokens"] > 0


def test_an_answer_has_its_text_and_how_it_ended(client: httpx.Client) -> None:
    answer = generated(client)
    shown = client.get(f"/v1/jobs/{answer['id']}/answer").json()
    (choice,) = shown["choices"]
    assert (choice["text"], choice["finish_reason"]) == (answer["text"], "length")
    assert (choice["reasoning"], choice["tool_calls"]) == ("", [])
    assert (shown["num_tokens"], shown["is_cut"], shown["has_expired"]) == (30, False, False)


@pytest.mark.parametrize("num_tokens", [1, 40, 100, 299])
def test_a_long_answer_is_cut_at_the_limit(client: httpx.Client, num_tokens: int) -> None:
    answer = generated(client, max_tokens=300)
    shown = client.get(f"/v1/jobs/{answer['id']}/answer", params={"limit": num_tokens}).json()
    (choice,) = shown["choices"]
    assert (shown["num_tokens"], shown["is_cut"]) == (num_tokens, True)
    assert answer["text"].startswith(choice["text"])
    assert choice["finish_reason"] is None
    whole = client.get(f"/v1/jobs/{answer['id']}/answer", params={"limit": 300}).json()
    assert (whole["num_tokens"], whole["is_cut"]) == (300, False)


def test_choices_are_apart(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": TEXT, "n": 3, "max_tokens": 20}
    answer = client.post("/v1/completions", json=body).json()
    shown = client.get(f"/v1/jobs/{answer['id']}/answer").json()
    assert [choice["index"] for choice in shown["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in shown["choices"]] == [
        choice["text"] for choice in answer["choices"]
    ]


def test_a_running_job_is_read_without_becoming_a_reader_of_it(
    client: httpx.Client, service: RunningService
) -> None:
    """Its only reader leaves: the job is cancelled, whoever looks."""
    service.script.stop_after = 5
    body = {"prompt": TEXT, "max_tokens": 30, "stream": True, "on_disconnect": "cancel"}
    with client.stream("POST", "/generate", json=body) as response:
        name = response.headers["x-request-id"]

        def look() -> dict[str, Any]:
            shown: dict[str, Any] = client.get(f"/v1/jobs/{name}/answer").json()
            return shown

        wait_until(lambda: look()["num_tokens"] == 5, "five tokens")
        (choice,) = look()["choices"]
        assert TEXT.startswith(choice["text"])
        assert client.get(f"/v1/jobs/{name}/prompt").json()["text"] == TEXT
    wait_until(lambda: client.get(f"/v1/jobs/{name}").json()["status"] == "cancelled", "the cancel")


def test_an_answer_that_is_no_longer_stored_is_said_to_be(
    client: httpx.Client, service: RunningService
) -> None:
    name = generated(client)["id"]
    redis: Any = service.transport.connections.commands
    service.call(redis.delete(service.transport.keys.log(name.removeprefix("gen-"))))
    shown = client.get(f"/v1/jobs/{name}/answer").json()
    assert (shown["choices"], shown["has_expired"]) == ([], True)
    assert shown["message"] == LOST_OUTPUT


def test_an_answer_that_has_expired_says_so(client: httpx.Client, service: RunningService) -> None:
    name = generated(client)["id"]
    expire_text(service, name)
    shown = client.get(f"/v1/jobs/{name}/answer").json()
    assert (shown["choices"], shown["has_expired"]) == ([], True)
    assert "PENSTOCK_TEXT_RETENTION_S" in shown["message"]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("prompt", "limit=0"),
        ("prompt", "limit=65537"),
        ("prompt", "after=-1"),
        ("answer", "limit=262145"),
        ("answer", "after=1"),
    ],
)
def test_a_query_out_of_bounds_is_refused_by_name(
    client: httpx.Client, path: str, query: str
) -> None:
    name = generated(client)["id"]
    refused = client.get(f"/v1/jobs/{name}/{path}?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]
