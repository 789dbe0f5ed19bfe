from __future__ import annotations

from collections.abc import Sequence

import pytest

from api.jobs import accepted_jobs
from api.jobs.accepted_jobs import DURABLE_S, PAGE, AcceptedJobs
from shared.messages import Durability, Idempotency, Job, JobState
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.jobs import MAX_BLIND_S, PATIENCE_S, Restored
from tests.support.transport_steps import make_job


class Store:
    """A server that may lose its jobs; `over` are those that were removed after their end."""

    def __init__(self) -> None:
        self.found: dict[str, JobState] = {}
        self.over: set[str] = set()
        self.again: list[tuple[Job, int]] = []
        self.looked: list[Sequence[str]] = []
        self.is_full = False

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        self.looked.append(job_ids)
        return [self.found.get(job_id) for job_id in job_ids]

    async def submit_again(self, job: Job, timeout_ms: int) -> Restored:
        if self.is_full:
            raise QueueFull("memory", 1.0)
        self.again.append((job, timeout_ms))
        if job.job_id in self.over:
            return Restored.OVER
        self.found[job.job_id] = JobState.QUEUED
        return Restored.RESTORED


class Bench:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.store = Store()
        self.jobs = AcceptedJobs(self.store, lambda: self.now_s)  # type: ignore[arg-type]

    def accept(self, **changes: object) -> Job:
        job = make_job(**{"kind": "response", "timeout_ms": 60_000, **changes})
        self.jobs.add(job)
        self.store.found[job.job_id] = JobState.QUEUED
        return job

    async def look(self, *, after_s: float = 1.0) -> None:
        self.now_s += after_s
        await self.jobs.look()


async def test_a_lost_job_is_queued_again_as_it_was_with_what_is_left_of_its_time() -> None:
    bench = Bench()
    key = Idempotency(key="k", body="b")
    job = bench.accept(
        request_record="{}", idempotency=key, retain_ms=5, durability=Durability.FSYNC
    )
    await bench.look()
    bench.store.found.clear()
    await bench.look()
    assert not bench.store.again, "its worker has time to put it back"
    await bench.look(after_s=PATIENCE_S)
    assert bench.store.again == [(job, 60_000 - 2000 - round(PATIENCE_S * 1000))]
    await bench.look()
    assert len(bench.store.again) == 1


async def test_one_that_its_worker_has_put_back_is_left_alone() -> None:
    bench = Bench()
    job = bench.accept()
    bench.store.found.clear()
    await bench.look()
    bench.store.found[job.job_id] = JobState.RUNNING
    await bench.look(after_s=PATIENCE_S)
    bench.store.found.clear()
    await bench.look(after_s=PATIENCE_S)
    assert not bench.store.again, "the patience begins anew with every loss"


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.FAILED, JobState.EXPIRED])
async def test_what_ended_within_moments_may_be_lost_with_its_end(state: JobState) -> None:
    bench = Bench()
    job = bench.accept()
    bench.store.found[job.job_id] = state
    await bench.look()
    assert len(bench.jobs) == 1
    await bench.look(after_s=DURABLE_S)
    assert len(bench.jobs) == 0


async def test_what_was_cancelled_or_removed_never_comes_back() -> None:
    bench = Bench()
    cancelled, removed = bench.accept(), bench.accept()
    bench.store.found[cancelled.job_id] = JobState.CANCELLED
    del bench.store.found[removed.job_id]
    bench.store.over.add(removed.job_id)
    await bench.look()
    assert len(bench.jobs) == 1
    await bench.look(after_s=PATIENCE_S)
    assert len(bench.jobs) == 0
    assert bench.store.found == {cancelled.job_id: JobState.CANCELLED}


async def test_a_frontend_after_a_long_pause_queues_no_job_again() -> None:
    bench = Bench()
    bench.accept()
    bench.store.found.clear()
    await bench.look(after_s=MAX_BLIND_S + 1)
    assert (len(bench.jobs), bench.store.again) == (0, [])


async def test_a_full_server_is_tried_again() -> None:
    bench = Bench()
    bench.accept()
    bench.store.found.clear()
    bench.store.is_full = True
    await bench.look()
    await bench.look(after_s=PATIENCE_S)
    bench.store.is_full = False
    await bench.look()
    assert len(bench.store.again) == 1


async def test_every_job_has_its_turn_a_page_at_a_time() -> None:
    bench = Bench()
    jobs = [bench.accept() for _ in range(PAGE + 5)]
    await bench.look()
    await bench.look()
    first, second = bench.store.looked
    assert (len(first), len(second)) == (PAGE, PAGE)
    assert {*first, *second} == {job.job_id for job in jobs}


async def test_jobs_and_bytes_are_bounded_and_the_oldest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepted_jobs, "MAX_JOBS", 3)
    bench = Bench()
    jobs = [bench.accept() for _ in range(5)]
    await bench.look()
    assert bench.store.looked == [[job.job_id for job in jobs[2:]]]
    monkeypatch.setattr(accepted_jobs, "MAX_BYTES", 4000)
    bench.accept(request_record="x" * 3500)
    assert len(bench.jobs) < 3
    bench.accept(request_record="x" * 5000)
    assert len(bench.jobs) == 0
    assert bench.jobs._num_bytes == 0
