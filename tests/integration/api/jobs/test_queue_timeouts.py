"""A request waits for a worker as long as it or the setting says, in every dialect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.batches import begin_batch, ended_batch
from tests.support.dialects import DIALECTS, Dialect
from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service

GENERATE = {"prompt": "a", "stream": False}
SETTING_S = 0.3

shared_service = module_service(queue_timeout_s=SETTING_S)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
def test_a_queue_timeout_is_an_error_in_every_dialect(
    client: httpx.Client, service: RunningService, dialect: Dialect
) -> None:
    service.park()
    answer = dialect.post(client, queue_timeout=0.1)
    error = dialect.error(answer, 504, "timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert "within its queue timeout" in error.message
    assert error.code == "queue_timeout"
    job = service.job(answer.headers["x-request-id"])
    assert (job["status"], job["attempt"]) == ("expired", 0)
    assert job["error"]["code"] == "queue_timeout"
    assert job["queue_expires_at"] == pytest.approx(job["created_at"] + 0.1)
    assert job["expires_at"] > job["queue_expires_at"] + 60
    assert job["ended_at"] >= job["queue_expires_at"]
    assert service.worker.seen == []
    stream = dialect.post(client, queue_timeout=0.1, stream=True)
    assert stream.status_code == 200
    assert dialect.failure(stream.content, "timeout").code == "queue_timeout"


def test_the_default_timeout_holds_where_a_request_has_none_and_a_client_waits(
    client: httpx.Client, service: RunningService
) -> None:
    service.park()
    going_on = DIALECTS["responses"].post(client, background=True).json()
    assert going_on["status"] == "queued"
    with client.stream(
        "POST", "/generate", json={"prompt": "a", "on_disconnect": "continue"}
    ) as plain:
        continued = plain.headers["x-request-id"]
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(client.post, "/generate", json={**GENERATE, "queue_timeout": 599})
        hasty = client.post("/generate", json=GENERATE)
        assert hasty.status_code == 504
        job = service.job(hasty.headers["x-request-id"])
        assert job["queue_expires_at"] == pytest.approx(job["created_at"] + SETTING_S)
        service.script.pulls = True
        assert patient.result().status_code == 200
    for name in (going_on["id"], continued):
        wait_until(lambda n=name: service.job(n)["status"] == "finished", "its end")
        assert service.job(name)["queue_expires_at"] is None


def test_a_job_that_was_begun_in_time_is_not_timed_out(
    client: httpx.Client, service: RunningService
) -> None:
    service.script.starts = False
    redis: Any = service.transport.connections.commands
    with ThreadPoolExecutor() as pool:
        body = {**GENERATE, "queue_timeout": 600}
        begun = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: service.worker.seen, "the job to be begun")
        service.park()
        key = service.transport.keys.job(service.worker.seen[0].job.job_id)
        service.call(redis.hset(key, "queue_deadline_ms", 1))
        # One that came later has waited too long: whoever looks for such jobs has passed by.
        assert client.post("/generate", json=GENERATE).status_code == 504
        service.script.starts = True
        answer = begun.result()
    assert answer.status_code == 200
    assert service.job(answer.json()["id"])["attempt"] == 1


def test_rows_of_a_batch_wait_as_long_as_the_batch_may(
    client: httpx.Client, service: RunningService
) -> None:
    service.park()
    made = begin_batch(client, {"model": MODEL, "prompt": "a", "max_tokens": 4}).json()

    def queued() -> list[dict[str, Any]]:
        jobs = client.get("/v1/jobs", params={"state": "queued"}).json()["data"]
        return [job for job in jobs if job["kind"] == "completion"]

    wait_until(queued, "its row to wait in the queue")
    assert client.post("/generate", json=GENERATE).status_code == 504
    assert [job["queue_expires_at"] for job in queued()] == [None]
    service.script.pulls = True
    ended = ended_batch(client, made["id"])
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 1)
