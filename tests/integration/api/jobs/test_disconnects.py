"""A client that leaves cancels its job, in every state and in both forms of answer."""

from __future__ import annotations

import httpx
import pytest
from redis import Redis

from shared.keys import Keys
from tests.support.dialects import DIALECTS
from tests.support.running_service import MODEL, RunningService, wait_until

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "water and iron"}],
    "max_tokens": 400,
    "ignore_eos": True,
}


@pytest.mark.promise("HTTP: a disconnect reaches the engine, also if a message is lost")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("name", "state"),
    [*((name, "decode") for name in DIALECTS), ("chat", "queued"), ("chat", "prefill")],
)
def test_leaving_cancels_the_job(
    service: RunningService, name: str, state: str, stream: bool
) -> None:
    dialect = DIALECTS[name]
    before = service.job_ids()
    service.hold_jobs_in(state)
    service.script.says = service.text.tokenizer.encode("water", add_special_tokens=False)
    caller = service.request(dialect.body(stream=stream, max_tokens=400), dialect.path)
    job_id = service.until_job_in(state, before)
    caller.close()
    assert service.job(job_id)["kind"] == dialect.kind
    service.until_disconnected(job_id)


@pytest.mark.parametrize("stream", [True, False])
def test_a_job_with_policy_continue_runs_on(service: RunningService, stream: bool) -> None:
    before = service.job_ids()
    service.hold_jobs_in("decode")
    service.script.step_s = 0.005
    caller = service.request({**CHAT, "stream": stream, "on_disconnect": "continue"})
    job_id = service.until_job_in("decode", before)
    caller.close()
    service.until_job_is(job_id, "finished")


def test_a_job_with_a_grace_period_outlives_its_reader_for_now(service: RunningService) -> None:
    before = service.job_ids()
    service.hold_jobs_in("decode")
    caller = service.request({**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = service.until_job_in("decode", before)
    caller.close()
    wait_until(lambda: not len(service.app.state.open_requests), "the answer to end")
    assert service.job(job_id)["status"] == "running"
    service.script.step_s = 0
    service.until_job_is(job_id, "finished")


def grace_has_begun(service: RunningService, job_id: str) -> bool:
    keys = Keys(namespace=service.settings.namespace)
    with Redis.from_url(service.settings.redis_url) as server:
        return bool(server.hexists(keys.job(job_id), "orphan_ms"))


def test_the_grace_period_begins_when_the_last_reader_leaves(service: RunningService) -> None:
    before = service.job_ids()
    service.hold_jobs_in("decode")
    caller = service.request({**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = service.until_job_in("decode", before)
    url = f"{service.base_url}/v1/jobs/{job_id}/stream"
    with httpx.stream("GET", url) as tail:
        pieces = tail.iter_raw()  # held: one that is collected closes the connection
        assert next(pieces)
        caller.close()
        wait_until(lambda: len(service.app.state.open_requests) == 1, "the first reader's end")
    wait_until(lambda: grace_has_begun(service, job_id), "the grace period")
    with httpx.stream("GET", url) as tail:
        pieces = tail.iter_raw()
        assert next(pieces)
        wait_until(lambda: not grace_has_begun(service, job_id), "the grace period's end")
    wait_until(lambda: grace_has_begun(service, job_id), "the second grace period")
    assert service.job(job_id)["status"] == "running"
    service.script.step_s = 0
    service.until_job_is(job_id, "finished")


def test_a_tail_that_leaves_begins_no_grace_period_of_a_job_with_another_reader(
    service: RunningService,
) -> None:
    before = service.job_ids()
    service.hold_jobs_in("decode")
    caller = service.request({**CHAT, "stream": True, "on_disconnect": "grace"})
    job_id = service.until_job_in("decode", before)
    with httpx.stream("GET", f"{service.base_url}/v1/jobs/{job_id}/stream") as tail:
        assert next(tail.iter_raw())
    wait_until(lambda: len(service.app.state.open_requests) == 1, "the tail's end")
    wait_until(lambda: not grace_has_begun(service, job_id), "the other reader's word")
    service.script.step_s = 0
    service.until_job_is(job_id, "finished")
    caller.close()


def test_many_clients_that_leave_leave_nothing_behind(service: RunningService) -> None:
    service.script.step_s = 0.01
    for number in range(40):
        caller = service.request({**CHAT, "stream": number % 2 == 0})
        if number % 3:
            wait_until(lambda: service.worker.jobs, "a running job")
        caller.close()
    wait_until(lambda: not len(service.app.state.open_requests), "the answers to end")
    wait_until(lambda: not service.worker.jobs, "the worker to be idle")
    wait_until(
        lambda: httpx.get(f"{service.base_url}/health").json()["waiting"] == 0, "an empty queue"
    )
    assert httpx.post(f"{service.base_url}/generate", json={"prompt": "a"}).status_code == 200
