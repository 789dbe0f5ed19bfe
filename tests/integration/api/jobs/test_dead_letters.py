"""Dead letters over HTTP: listed, run again, thrown away."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.running_service import RunningService, wait_until

PROMPT = {"prompt": "a gate and a wheel", "max_tokens": 8, "on_disconnect": "continue"}
PATIENCE = {"queue_timeout": 300}


@pytest.fixture
def letter(client: httpx.Client, service: RunningService) -> str:
    """The public id of a job that killed its last engine a moment ago."""
    service.park()
    queue, worker_id = service.transport.queue, service.worker.worker_id
    redis: Any = service.transport.connections.commands
    with client.stream("POST", "/generate", json=PROMPT | PATIENCE) as answer:
        name = answer.headers["x-request-id"]
        (delivery,) = service.call(queue.pull(worker_id, 1, 0))
        job_id = delivery.job.job_id
        assert name.endswith(job_id)
        service.call(redis.hset(service.transport.keys.job(job_id), "crashes", 3))
        service.call(queue.crashed(worker_id, [(job_id, delivery.attempt)]))
        assert '"code":"poison"' in answer.read().decode()
    service.script.pulls = True
    return str(name)


def names(client: httpx.Client) -> list[str]:
    return [letter["id"] for letter in client.get("/v1/dead-letters?limit=100").json()["data"]]


def test_a_letter_is_listed_with_what_happened(client: httpx.Client, letter: str) -> None:
    listed = client.get("/v1/dead-letters", params={"limit": 1}).json()
    assert listed["object"] == "list"
    (found,) = listed["data"]
    assert (found["id"], found["object"]) == (letter, "dead_letter")
    assert (found["code"], found["crashes"], found["kind"]) == ("poison", 4, "generate")
    assert found["died_at"] == client.get(f"/v1/jobs/{letter}").json()["ended_at"]
    for query in ("limit=0", "limit=x", "order=asc"):
        refused = client.get(f"/v1/dead-letters?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.promise("Access: a job that crashed workers is kept, and can be requeued once")
def test_a_letter_is_run_again_once(client: httpx.Client, letter: str) -> None:
    first = client.post(f"/v1/jobs/{letter}/requeue")
    assert first.status_code == 200
    new = first.json()
    assert new["id"] != letter
    assert client.get(f"/v1/jobs/{letter}").json()["queue_expires_at"] is not None
    assert new["queue_expires_at"] is None  # nobody waits for this one
    assert letter not in names(client)
    again = client.post(f"/v1/jobs/{letter}/requeue").json()
    assert again["id"] == new["id"]
    wait_until(
        lambda: client.get(f"/v1/jobs/{new['id']}").json()["status"] == "finished", "its end"
    )
    assert client.get(f"/v1/jobs/{new['id']}").json()["usage"]["completion_tokens"] == 8
    assert client.get(f"/v1/jobs/{letter}").json()["status"] == "failed"
    assert client.delete(f"/v1/dead-letters/{letter}").status_code == 404


def test_a_letter_is_thrown_away(client: httpx.Client, letter: str) -> None:
    gone = client.delete(f"/v1/dead-letters/{letter}").json()
    assert gone == {"id": letter, "object": "dead_letter", "deleted": True}
    assert letter not in names(client)
    for answer in (
        client.delete(f"/v1/dead-letters/{letter}"),
        client.post(f"/v1/jobs/{letter}/requeue"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "dead_letter_not_found"


def test_a_letter_without_its_request_cannot_be_run_again(
    client: httpx.Client,
    service: RunningService,
    letter: str,
) -> None:
    redis: Any = service.transport.connections.commands
    key = service.transport.keys.dead_letter(letter.removeprefix("gen-"))
    for kept in ("", "{"):
        service.call(redis.hset(key, "request", kept))
        refused = client.post(f"/v1/jobs/{letter}/requeue")
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "payload_lost"
    assert letter in names(client)


def test_a_job_without_a_letter_cannot_be_run_again(client: httpx.Client) -> None:
    done = client.post("/generate", json={**PROMPT, "stream": False}).json()["id"]
    for name in (done, "none", "0-nothing"):
        assert client.post(f"/v1/jobs/{name}/requeue").status_code == 404
        assert client.delete(f"/v1/dead-letters/{name}").status_code == 404
