"""A client that leaves cancels its job, in every state and in both forms of answer."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from redis import Redis

from shared.keys import Keys
from tests.support.running_service import MODEL, RunningService, wait_until

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "water and iron"}],
    "max_tokens": 400,
    "ignore_eos": True,
}


class Caller:
    """One request over a connection that the test can drop at any moment."""

    def __init__(self, service: RunningService, body: dict[str, Any]) -> None:
        address = urlsplit(service.base_url)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port)
        self._connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {
                "content-type": "application/json",
                "x-client-request-id": threading.current_thread().name,
            },
        )

    def leave(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.close()
        self._connection.close()


def status_of(service: RunningService, job_id: str) -> str:
    return str(httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()["status"])


def enter_state(service: RunningService, state: str) -> None:
    service.script.step_s = 0.2  # so slowly that no answer ends before its test wants it to
    service.script.pulls = state != "queued"
    service.script.starts = state != "prefill"
    wait_until(lambda: service.worker.is_parked == (state == "queued"), "the worker's attention")


def jobs_of(service: RunningService) -> set[str]:
    """All that there are before a test submits its own."""
    listed = httpx.get(f"{service.base_url}/v1/jobs?limit=1000").json()["data"]
    return {job["job_id"] for job in listed}


def job_in_state(service: RunningService, state: str, before: set[str]) -> str:
    """The id of the new job, once it is where the test wants it."""

    def found() -> str | None:
        jobs = httpx.get(f"{service.base_url}/v1/jobs?limit=1000").json()["data"]
        for job in jobs:
            if job["job_id"] in before:
                continue
            if state == "queued" and job["status"] == "queued":
                return str(job["job_id"])
            if state == "prefill" and job["job_id"] in service.worker.jobs:
                return str(job["job_id"])
            if state == "decode" and job["usage"]["completion_tokens"] > 2:
                return str(job["job_id"])
        return None

    wait_until(found, f"a job in state {state}")
    name = found()
    assert name is not None
    return name


@pytest.mark.promise("HTTP: a disconnect reaches the engine, also if a message is lost")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_leaving_cancels_the_job(service: RunningService, state: str, stream: bool) -> None:
    before = jobs_of(service)
    enter_state(service, state)
    caller = Caller(service, {**CHAT, "stream": stream})
    job_id = job_in_state(service, state, before)
    caller.leave()
    wait_until(lambda: status_of(service, job_id) == "cancelled", "the cancel")
    view = httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()
    assert view["error"]["code"] == "disconnected"
    service.script.pulls = service.script.starts = True
    wait_until(lambda: job_id not in service.worker.jobs, "the worker to drop it")


@pytest.mark.parametrize("stream", [True, False])
def test_a_job_with_policy_continue_runs_on(service: RunningService, stream: bool) -> None:
    before = jobs_of(service)
    enter_state(service, "decode")
    service.script.step_s = 0.005
    caller = Caller(service, {**CHAT, "stream": stream, "on_disconnect": "continue"})
    job_id = job_in_state(service, "decode", before)
    caller.leave()
    wait_until(lambda: status_of(service, job_id) == "finished", "the end of the job")


def test_a_job_with_a_grace_period_outlives_its_reader_for_now(service: RunningService) -> None:
    before = jobs_of(service)
    enter_state(service, "decode")
    caller = Caller(service, {**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = job_in_state(service, "decode", before)
    caller.leave()
    wait_until(lambda: not len(service.app.state.open_requests), "the answer to end")
    assert status_of(service, job_id) == "running"
    service.script.step_s = 0
    wait_until(lambda: status_of(service, job_id) == "finished", "the end of the job")


def grace_has_begun(service: RunningService, job_id: str) -> bool:
    keys = Keys(namespace=service.settings.namespace)
    with Redis.from_url(service.settings.redis_url) as server:
        return bool(server.hexists(keys.job(job_id), "orphan_ms"))


def test_the_grace_period_begins_when_the_last_reader_leaves(service: RunningService) -> None:
    before = jobs_of(service)
    enter_state(service, "decode")
    caller = Caller(service, {**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = job_in_state(service, "decode", before)
    url = f"{service.base_url}/v1/jobs/{job_id}/stream"
    with httpx.stream("GET", url) as tail:
        pieces = tail.iter_raw()  # held: one that is collected closes the connection
        assert next(pieces)
        caller.leave()
        wait_until(lambda: len(service.app.state.open_requests) == 1, "the first reader's end")
    wait_until(lambda: grace_has_begun(service, job_id), "the grace period")
    with httpx.stream("GET", url) as tail:
        pieces = tail.iter_raw()
        assert next(pieces)
        wait_until(lambda: not grace_has_begun(service, job_id), "the grace period's end")
    wait_until(lambda: grace_has_begun(service, job_id), "the second grace period")
    assert status_of(service, job_id) == "running"
    service.script.step_s = 0
    wait_until(lambda: status_of(service, job_id) == "finished", "the end of the job")


def test_a_tail_that_leaves_begins_no_grace_period_of_a_job_with_another_reader(
    service: RunningService,
) -> None:
    before = jobs_of(service)
    enter_state(service, "decode")
    caller = Caller(service, {**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = job_in_state(service, "decode", before)
    with httpx.stream("GET", f"{service.base_url}/v1/jobs/{job_id}/stream") as tail:
        assert next(tail.iter_raw())
    wait_until(lambda: len(service.app.state.open_requests) == 1, "the tail's end")
    wait_until(lambda: not grace_has_begun(service, job_id), "the other reader's word")
    service.script.step_s = 0
    wait_until(lambda: status_of(service, job_id) == "finished", "the end of the job")
    caller.leave()


def test_many_clients_that_leave_leave_nothing_behind(service: RunningService) -> None:
    service.script.step_s = 0.01
    for number in range(40):
        caller = Caller(service, {**CHAT, "stream": number % 2 == 0})
        if number % 3:
            wait_until(lambda: service.worker.jobs, "a running job")
        caller.leave()
    wait_until(lambda: not len(service.app.state.open_requests), "the answers to end")
    wait_until(lambda: not service.worker.jobs, "the worker to be idle")
    wait_until(
        lambda: httpx.get(f"{service.base_url}/health").json()["waiting"] == 0, "an empty queue"
    )
    assert httpx.post(f"{service.base_url}/generate", json={"prompt": "a"}).status_code == 200
