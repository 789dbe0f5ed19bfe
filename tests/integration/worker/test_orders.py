"""An operator drains a worker process and pauses its model's queue, over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.launcher.processes import ReportPipe
from tests.integration.worker.conftest import StartWorker
from tests.support.running_service import RunningService, running_frontend, wait_until
from tests.support.service_processes import WorkerProcess

LONG = {"model": "tiny", "input": "a prompt", "max_output_tokens": 200, "background": True}
SHORT = LONG | {"max_output_tokens": 4}


@pytest.fixture
def service(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[RunningService]:
    with running_frontend(redis_url, namespace, files_dir=str(tmp_path / "files")) as frontend:
        yield frontend


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        yield client


@pytest.fixture
def started(start_worker: StartWorker, service: RunningService) -> WorkerProcess:
    worker = asyncio.run(start_worker(ECHO_STEP_MS=20).ready())
    service.until_ready()
    return worker


def submit(client: httpx.Client, body: dict[str, Any]) -> str:
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    job_id: str = response.json()["id"]
    return job_id


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()
    return found


def worker_of(client: httpx.Client) -> dict[str, Any]:
    wait_until(lambda: client.get("/health").json()["workers"])
    (worker,) = client.get("/health").json()["workers"]
    found: dict[str, Any] = worker
    return found


def has_tokens(client: httpx.Client, job_id: str) -> Callable[[], bool]:
    return lambda: job(client, job_id)["usage"]["completion_tokens"] > 0


@pytest.mark.promise("Access: an operator drains a worker and resumes it, at any frontend")
def test_a_drained_worker_ends_its_jobs_and_waits_for_the_order_to_serve_again(
    service: RunningService,
    client: httpx.Client,
    started: WorkerProcess,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = submit(client, LONG)
    wait_until(has_tokens(client, running))
    worker_id = worker_of(client)["id"]
    with caplog.at_level(logging.WARNING, logger="api.system.orders"):
        drained = client.post(f"/v1/workers/{worker_id}/drain")
    assert drained.json() == {"object": "worker.order", "id": worker_id, "order": "drain"}
    (line,) = [record for record in caplog.records if record.name == "api.system.orders"]
    assert (line.worker_id, line.order, line.key_id) == (worker_id, "drain", "none")  # type: ignore[attr-defined]
    waiting = submit(client, SHORT)
    wait_until(lambda: job(client, running)["status"] == "finished")
    assert job(client, running)["attempt"] == 1
    assert job(client, waiting)["status"] == "queued"
    wait_until(lambda: worker_of(client)["status"] == "draining")
    assert worker_of(client)["order"] == "drain"
    metrics = client.get("/metrics/deployment").text
    assert 'penstock:workers{status="draining"} 1.0' in metrics

    # Another frontend, after this one's end, knows of it and undoes it.
    with running_frontend(redis_url, namespace, files_dir=str(tmp_path / "more")) as other:
        other.until_ready()
        with httpx.Client(base_url=other.base_url, timeout=60) as again:
            assert job(again, waiting)["status"] == "queued"
            assert again.post(f"/v1/workers/{worker_id}/resume").json()["order"] == "serve"
    wait_until(lambda: job(client, waiting)["status"] == "finished")
    wait_until(lambda: worker_of(client)["status"] == "ok")
    log = started.log
    assert "draining: an operator ordered the worker to take no new jobs" in log
    assert "an operator ordered the worker to serve again" in log


def test_a_worker_that_is_ordered_to_exit_ends_its_jobs_first(
    service: RunningService, client: httpx.Client, start_worker: StartWorker
) -> None:
    with ReportPipe() as pipe:
        # Its own drain would hand the job back at once.
        started = start_worker(
            ECHO_STEP_MS=20, DRAIN_TIMEOUT_S="0", **pipe.environment, pass_fds=pipe.pass_fds
        )
        asyncio.run(started.ready())
        service.until_ready()
        running = submit(client, LONG)
        wait_until(has_tokens(client, running))
        worker_id = worker_of(client)["id"]
        answer = client.post(f"/v1/workers/{worker_id}/drain?exit=true")
        assert answer.json()["order"] == "exit"
        assert asyncio.run(started.ended()) == 0
        assert pipe.read() == (True, "an operator ordered it to exit")
    assert job(client, running)["status"] == "finished"
    assert job(client, running)["attempt"] == 1
    gone = client.post(f"/v1/workers/{worker_id}/resume")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "worker_not_found")


@pytest.mark.promise("Access: an operator pauses a model's queue, which continues to accept jobs")
def test_a_paused_queue_says_so_to_who_waits_and_moves_on_when_it_is_resumed(
    client: httpx.Client, started: WorkerProcess
) -> None:
    running = submit(client, LONG)
    wait_until(has_tokens(client, running))
    paused = client.post("/v1/models/tiny/pause").json()
    assert (paused["is_paused"], paused["changed"], paused["ignored_by"]) == (True, True, [])
    waiting = submit(client, SHORT)
    wait_until(lambda: job(client, waiting)["queue_paused"])
    assert job(client, waiting)["queue_position"] == 0
    wait_until(lambda: client.get("/v1/models/tiny").json()["is_paused"])
    wait_until(lambda: "paused_since" in client.get("/health").json()["models"]["tiny"])
    assert 'penstock:queue_paused{model_name="tiny"} 1.0' in client.get("/metrics/deployment").text
    wait_until(lambda: job(client, running)["status"] == "finished")
    assert job(client, waiting)["status"] == "queued"
    late = submit(client, SHORT | {"queue_timeout": 0.2})
    wait_until(lambda: job(client, late)["status"] == "expired")
    assert client.post("/v1/models/tiny/resume").json()["changed"] is True
    wait_until(lambda: job(client, waiting)["status"] == "finished")


def test_orders_are_for_what_is_there(client: httpx.Client, started: WorkerProcess) -> None:
    for path, code in (
        ("/v1/workers/nobody/drain", "worker_not_found"),
        ("/v1/models/org/none/pause", "model_not_found"),
    ):
        answer = client.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    assert client.post("/v1/models/tiny/resume").json()["changed"] is False
