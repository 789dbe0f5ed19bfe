"""An operator finds jobs by what they have, cancels many of them and runs dead letters again."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.support.running_service import MODEL, RunningService

PROMPT = {"prompt": "a gate and a wheel", "max_tokens": 8, "stream": False}
BACKGROUND = {"model": MODEL, "input": "a gate", "max_output_tokens": 8, "background": True}


def submit(client: httpx.Client, number: int) -> list[str]:
    return [client.post("/v1/responses", json=BACKGROUND).json()["id"] for _ in range(number)]


def listed(client: httpx.Client, **query: Any) -> list[str]:
    return [job["id"] for job in client.get("/v1/jobs", params=query).json()["data"]]


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def slices(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    found = [post(client, path, **body)]
    while found[-1]["has_more"]:
        found.append(post(client, path, **body, after=found[-1]["next"]))
    return found


def test_jobs_are_listed_by_filters_in_pages(client: httpx.Client, service: RunningService) -> None:
    service.park()
    ids = submit(client, 5)
    assert set(listed(client, state="queued", model=MODEL)) >= set(ids)
    assert listed(client, model="another") == []
    assert listed(client, tenant="another") == []
    assert listed(client, id=ids[2]) == [ids[2]]
    assert listed(client, id=ids[2][-12:]) == [ids[2]]
    assert listed(client, id="gen-") == [], "a prefix is no part of an id"
    found: list[str] = []
    query: dict[str, Any] = {"state": "queued", "limit": 2}
    while True:
        page = client.get("/v1/jobs", params=query).json()
        assert page["searched"] >= len(page["data"])
        found += [job["id"] for job in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["next"]
    assert page["next"] is None
    assert [number for number in Counter(found).values() if number > 1] == []
    assert set(ids) <= set(found)
    for wrong in ("after=x", "after=live.1.x", "model=", "id=", "error=" + "x" * 300):
        refused = client.get(f"/v1/jobs?{wrong}")
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"] == wrong.partition("=")[0]
    post(client, "/v1/jobs/cancel", ids=ids)
    assert set(listed(client, error="cancelled", limit=100)) >= set(ids)


@pytest.mark.promise("Access: an operator cancels all jobs that match a filter, each once")
def test_all_jobs_that_match_are_cancelled_in_slices(
    client: httpx.Client, service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    service.park()
    post(client, "/v1/jobs/cancel", filter={})
    ids = submit(client, 5)
    wanted = {"state": "queued", "model": MODEL}
    counted = post(client, "/v1/jobs/cancel", filter=wanted, dry_run=True)
    assert (counted["matched"], counted["cancelled"], counted["has_more"]) == (5, 0, False)
    assert {client.get(f"/v1/jobs/{name}").json()["status"] for name in ids} == {"queued"}
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="api.jobs.bulk"):
        found = slices(client, "/v1/jobs/cancel", filter=wanted, limit=2)
    assert [one["cancelled"] for one in found] == [2, 2, 1]
    lines = [record for record in caplog.records if record.name == "api.jobs.bulk"]
    assert [line.asked for line in lines] == [wanted] * 3  # type: ignore[attr-defined]
    for name in ids:
        assert client.get(f"/v1/jobs/{name}").json()["error"]["code"] == "cancelled"
        log = client.get(f"/v1/jobs/{name}/events").json()["data"]
        assert [event["type"] for event in log] == ["end"], "exactly one terminal event"


def test_selected_jobs_are_cancelled_and_the_others_run(
    client: httpx.Client, service: RunningService
) -> None:
    service.park()
    ids = submit(client, 3)
    post(client, "/v1/jobs/cancel", ids=ids[:1])
    result = post(client, "/v1/jobs/cancel", ids=[*ids[:2], "resp_0-none", "no id"])
    assert (result["cancelled"], result["already_ended"], result["not_found"]) == (1, 1, 2)
    assert client.get(f"/v1/jobs/{ids[2]}").json()["status"] == "queued"
    client.delete(f"/v1/jobs/{ids[2]}")


@pytest.mark.parametrize("path", ["/v1/jobs/cancel", "/v1/dead-letters/requeue"])
def test_a_bulk_action_says_what_it_needs(client: httpx.Client, path: str) -> None:
    for body, param in (
        ({}, "ids"),
        ({"ids": ["0-x"], "filter": {}}, "ids"),
        ({"ids": []}, "ids"),
        ({"ids": ["0-x"] * 101}, "ids"),
        ({"filter": {"status": "queued"}}, "filter.status"),
        ({"filter": {}, "limit": 101}, "limit"),
        ({"filter": {}, "after": "x"}, "after"),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body


def dead_letters(client: httpx.Client, service: RunningService, number: int) -> list[str]:
    """Public ids of jobs that killed their last engine a moment ago."""
    service.park()
    queue, worker_id = service.transport.queue, service.worker.worker_id
    redis: Any = service.transport.connections.commands
    names = submit(client, number)
    while deliveries := service.call(queue.pull(worker_id, 16, 0)):
        for delivery in deliveries:
            job_id = delivery.job.job_id
            service.call(redis.hset(service.transport.keys.job(job_id), "crashes", 3))
            service.call(queue.crashed(worker_id, [(job_id, delivery.attempt)]))
    return names


def test_dead_letters_are_run_again_in_slices(
    client: httpx.Client, service: RunningService
) -> None:
    names = dead_letters(client, service, 5)
    lost = service.transport.keys.dead_letter(names[2].removeprefix("resp_"))
    redis: Any = service.transport.connections.commands
    service.call(redis.hdel(lost, "request"))
    path = "/v1/dead-letters/requeue"
    counted = post(client, path, filter={"error": "poison"}, dry_run=True)
    assert (counted["matched"], counted["requeued"]) == (5, 0)
    assert post(client, path, filter={"error": "another"}, dry_run=True)["matched"] == 0
    found = slices(client, path, filter={"error": "poison", "model": MODEL}, limit=2)
    assert [(one["requeued"], one["failed"]) for one in found] == [(2, 0), (1, 1), (1, 0)]
    left = [letter["id"] for letter in client.get("/v1/dead-letters").json()["data"]]
    assert left == [names[2]], "its request was lost: it stays"
    again = post(client, path, ids=[names[0], names[2], "resp_0-none"])
    assert (again["already_requeued"], again["failed"], again["not_found"]) == (1, 1, 1)
    assert post(client, "/v1/jobs/cancel", filter={})["cancelled"] == 4
    client.delete(f"/v1/dead-letters/{names[2]}")
