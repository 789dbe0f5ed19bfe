"""A request waits for a worker as long as it or the setting says, in every dialect."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "a", "stream": False},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 4},
}
SETTING_S = 0.3

shared_service = module_service(queue_timeout_s=SETTING_S)


def park(service: RunningService) -> None:
    """The worker lives and is busy: it takes nothing."""
    service.script.pulls = False
    wait_until(lambda: service.worker.is_parked, "the worker to stop pulling")


def job_of(client: httpx.Client, name: str) -> dict[str, Any]:
    return dict(client.get(f"/v1/jobs/{name}").json())


@pytest.mark.parametrize("path", BODIES)
def test_a_queue_timeout_is_an_error_in_every_dialect(
    client: httpx.Client, service: RunningService, path: str
) -> None:
    park(service)
    answer = client.post(path, json={**BODIES[path], "queue_timeout": 0.1})
    assert answer.status_code == 504, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert "within its queue timeout" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "timeout_error"
        assert error["details"]["error_code"] == "queue_timeout"
    else:
        assert (error["type"], error["code"]) == ("timeout", "queue_timeout")
    job = job_of(client, answer.headers["x-request-id"])
    assert (job["status"], job["attempt"]) == ("expired", 0)
    assert job["error"]["code"] == "queue_timeout"
    assert job["queue_expires_at"] == pytest.approx(job["created_at"] + 0.1)
    assert job["expires_at"] > job["queue_expires_at"] + 60
    assert job["ended_at"] >= job["queue_expires_at"]
    assert service.worker.seen == []


def test_a_stream_that_waited_in_vain_ends_with_the_error(
    client: httpx.Client, service: RunningService
) -> None:
    park(service)
    body = {**BODIES["/v1/chat/completions"], "stream": True}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    *_, last, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "queue_timeout"
    assert done == "data: [DONE]"


def test_the_default_timeout_holds_where_a_request_has_none_and_a_client_waits(
    client: httpx.Client, service: RunningService
) -> None:
    park(service)
    going_on = client.post(
        "/v1/responses", json={**BODIES["/v1/responses"], "background": True}
    ).json()
    assert going_on["status"] == "queued"
    with client.stream(
        "POST", "/generate", json={"prompt": "a", "on_disconnect": "continue"}
    ) as plain:
        continued = plain.headers["x-request-id"]
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(
            client.post, "/generate", json={**BODIES["/generate"], "queue_timeout": 599}
        )
        hasty = client.post("/generate", json=BODIES["/generate"])
        assert hasty.status_code == 504
        job = job_of(client, hasty.headers["x-request-id"])
        assert job["queue_expires_at"] == pytest.approx(job["created_at"] + SETTING_S)
        service.script.pulls = True
        assert patient.result().status_code == 200
    for name in (going_on["id"], continued):
        wait_until(lambda n=name: job_of(client, n)["status"] == "finished", "its end")
        assert job_of(client, name)["queue_expires_at"] is None


def test_a_job_that_was_begun_in_time_is_not_timed_out(
    client: httpx.Client, service: RunningService
) -> None:
    service.script.starts = False
    redis: Any = service.transport.connections.commands
    with ThreadPoolExecutor() as pool:
        body = {**BODIES["/generate"], "queue_timeout": 600}
        begun = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: service.worker.seen, "the job to be begun")
        park(service)
        key = service.transport.keys.job(service.worker.seen[0].job.job_id)
        service.call(redis.hset(key, "queue_deadline_ms", 1))
        # One that came later has waited too long: whoever looks for such jobs has passed by.
        assert client.post("/generate", json=BODIES["/generate"]).status_code == 504
        service.script.starts = True
        answer = begun.result()
    assert answer.status_code == 200
    assert job_of(client, answer.json()["id"])["attempt"] == 1


def test_rows_of_a_batch_wait_as_long_as_the_batch_may(
    client: httpx.Client, service: RunningService
) -> None:
    park(service)
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": "a", "max_tokens": 4},
    }
    upload = client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("rows", json.dumps(row).encode())}
    )
    params = {"endpoint": "/v1/completions", "completion_window": "24h"}
    made = client.post("/v1/batches", json={**params, "input_file_id": upload.json()["id"]}).json()

    def queued() -> list[dict[str, Any]]:
        jobs = client.get("/v1/jobs", params={"state": "queued"}).json()["data"]
        return [job for job in jobs if job["kind"] == "completion"]

    wait_until(queued, "its row to wait in the queue")
    assert client.post("/generate", json=BODIES["/generate"]).status_code == 504
    assert [job["queue_expires_at"] for job in queued()] == [None]
    service.script.pulls = True
    path = f"/v1/batches/{made['id']}"
    wait_until(lambda: client.get(path).json()["status"] == "completed", "its end")
    assert client.get(path).json()["request_counts"]["completed"] == 1
