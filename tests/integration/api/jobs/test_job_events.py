"""A job's log, a page at a time, and the attempts that wrote it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api.jobs import protocol
from tests.support.running_service import RunningService

PROMPT = {"prompt": "a gate and a wheel 😀 ", "max_tokens": 30, "ignore_eos": True}


def events(client: httpx.Client, name: str, limit: int) -> list[dict[str, Any]]:
    """All events of a job, read in pages."""
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": limit}
    while True:
        page = client.get(f"/v1/jobs/{name}/events", params=query).json()
        assert len(page["data"]) <= limit
        assert not page["has_expired"]
        found += page["data"]
        if not page["has_more"]:
            return found
        query["after"] = found[-1]["id"]


def test_pages_are_the_log_in_order(client: httpx.Client) -> None:
    answer = client.post("/generate", json={**PROMPT, "stream": False}).json()
    whole = events(client, answer["id"], 256)
    *deltas, end = whole
    assert "".join(event["text"] for event in deltas) == answer["text"]
    assert sum(event["num_tokens"] for event in deltas) == 30
    assert {event["type"] for event in deltas} == {"delta"}
    assert (end["type"], end["status"], end["reason"]) == ("end", "finished", "length")
    for limit in (1, 7, len(whole)):
        assert events(client, answer["id"], limit) == whole
    behind = client.get(f"/v1/jobs/{answer['id']}/events", params={"after": end["id"]}).json()
    assert (behind["data"], behind["has_more"]) == ([], False)


def test_a_long_event_is_cut(
    client: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_EVENT_CHARS", 20)
    service.script.tokens_per_step = 30
    answer = client.post("/generate", json={**PROMPT, "stream": False}).json()
    (delta, _) = events(client, answer["id"], 10)
    assert (delta["is_cut"], delta["num_tokens"]) == (True, 30)
    assert delta["text"] == answer["text"][:20]


def test_a_job_whose_text_has_gone_says_so(client: httpx.Client, service: RunningService) -> None:
    name = client.post("/generate", json={**PROMPT, "stream": False}).json()["id"]
    redis: Any = service.transport.connections.commands
    service.call(redis.delete(service.transport.keys.log(name.removeprefix("gen-"))))
    page = client.get(f"/v1/jobs/{name}/events").json()
    assert (page["data"], page["has_more"], page["has_expired"]) == ([], False, True)


@pytest.mark.parametrize("query", ["limit=0", "limit=257", "after=x", "after=1-2.0-1-1", "page=2"])
def test_a_query_that_is_none_is_refused_by_name(client: httpx.Client, query: str) -> None:
    name = client.post("/generate", json={**PROMPT, "stream": False}).json()["id"]
    refused = client.get(f"/v1/jobs/{name}/events?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]


def test_an_unknown_job_has_no_events(client: httpx.Client) -> None:
    for name in ("none", "gen-0-abc"):
        assert client.get(f"/v1/jobs/{name}/events").json()["error"]["code"] == "job_not_found"


def test_a_job_tells_of_its_attempts_and_how_each_ended(
    client: httpx.Client, service: RunningService
) -> None:
    """The first worker's engine dies, the next attempt is cancelled."""
    service.park()
    transport = service.transport
    with client.stream("POST", "/generate", json={**PROMPT, "queue_timeout": 300}) as answer:
        name = answer.headers["x-request-id"]
        (first,) = service.call(transport.queue.pull(service.worker.worker_id, 1, 0))
        job = client.get(f"/v1/jobs/{name}").json()
        (attempt,) = job["attempts"]
        assert (attempt["worker"], attempt["outcome"]) == ("w-scripted", None)
        held = [(first.job.job_id, first.attempt)]
        service.call(transport.queue.crashed(service.worker.worker_id, held))
        queued = client.get(f"/v1/jobs/{name}").json()
        assert [one["outcome"] for one in queued["attempts"]] == ["died"]
        service.call(transport.queue.recover(service.worker.worker_id, 1))
        running = client.get(f"/v1/jobs/{name}").json()
        assert [one["outcome"] for one in running["attempts"]] == ["died", None]
        assert running["attempts"][0]["started_at"] <= running["attempts"][1]["started_at"]
        client.delete(f"/v1/jobs/{name}")
        answer.read()
    service.script.pulls = True
    ended = client.get(f"/v1/jobs/{name}").json()
    assert [one["outcome"] for one in ended["attempts"]] == ["died", "ended"]
    assert ended["attempt"] == 2
