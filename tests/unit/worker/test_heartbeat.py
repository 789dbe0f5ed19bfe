from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

import pytest

from shared.transport.ports.deployment import Spent
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Delivery, HeartbeatReply, WorkerReport
from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue, make_job
from worker.heartbeat import Heartbeat
from worker.prefix_report import PrefixReport
from worker.running_jobs import RunningJob, RunningJobs
from worker.runtime.held_prefixes import HeldPrefixes
from worker.standing_order import StandingOrder


class Bench:
    """A heartbeat, and a stand-in for the engine and the publisher that it knows."""

    def __init__(self, lease_ms: int = 5000) -> None:
        self.queue = FakeQueue()
        self.jobs = RunningJobs(4)
        self.stalled = False
        self.is_lost = False
        self.dropped: list[tuple[str, int, str]] = []
        self.lost_jobs: list[tuple[str, int]] = []
        self.sure_jobs: set[str] = set()
        self.num_troubles = 0
        self.spent_us: Counter[str] = Counter()
        self.order = StandingOrder("w1", self.jobs)
        self.heartbeat = Heartbeat(
            self.queue,
            "w1",
            ("m",),
            self.jobs,
            self,
            self,  # type: ignore[arg-type]
            self.order,
            lease_ms=lease_ms,
            interval_s=0.001,
            stats=lambda: {"step": 7},
            spent_us=self.spent_us,
            on_drop=lambda *dropped: self.dropped.append(dropped),
            on_trouble=self._trouble,
            prefixes=PrefixReport(self.queue, "w1", lease_ms, HeldPrefixes()),
        )

    def sure(self, job_ids: Iterable[str], since_s: float) -> None:
        self.sure_jobs.update(job_ids)

    def lost(self, job_id: str, attempt: int) -> None:
        self.lost_jobs.append((job_id, attempt))

    def _trouble(self) -> None:
        self.num_troubles += 1

    def add(self, job_id: str, attempt: int) -> None:
        self.jobs.add(RunningJob.of(Delivery(make_job(job_id), attempt)))


async def test_a_heartbeat_reports_the_worker_and_its_load() -> None:
    bench = Bench()
    bench.add("0-a", 3)
    bench.stalled = True
    bench.heartbeat.is_stopping = True
    await bench.heartbeat.send()
    (report,) = bench.queue.heartbeats
    assert report.running == (("0-a", 3),)
    assert report.stats == {"step": 7}
    assert (report.models, report.lease_ms, report.draining, report.stalled) == (
        ("m",),
        5000,
        True,
        True,
    )


async def test_jobs_to_drop_are_named_with_the_attempt_that_the_heartbeat_spoke_of() -> None:
    bench = Bench()
    bench.add("0-a", 1)
    bench.add("0-b", 1)
    bench.queue.drops, bench.queue.taken_jobs = ["0-a", "0-b", "0-unknown"], ["0-b"]
    await bench.heartbeat.send()
    assert bench.dropped == [("0-a", 1, "dropped"), ("0-b", 1, "fenced")]


async def test_a_heartbeat_tells_which_jobs_the_server_has_lost_and_which_it_has() -> None:
    bench = Bench()
    for job_id in ("0-a", "0-b", "0-c"):
        bench.add(job_id, 2)
    bench.queue.drops, bench.queue.lost_jobs = ["0-a"], ["0-b", "0-unknown"]
    await bench.heartbeat.send()
    assert (bench.lost_jobs, bench.sure_jobs) == ([("0-b", 2)], {"0-c"})


async def test_a_worker_whose_engine_is_lost_does_not_heartbeat_while_it_has_jobs() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        bench.is_lost = True
        await until(lambda: bench.queue.heartbeats)  # no jobs: nothing to take from it
        bench.add("0-a", 1)
        await asyncio.sleep(0.01)
        num_heartbeats = len(bench.queue.heartbeats)
        await asyncio.sleep(0.03)
        assert len(bench.queue.heartbeats) == num_heartbeats
        bench.is_lost = False
        await until(lambda: len(bench.queue.heartbeats) > num_heartbeats)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_lost_heartbeat_is_trouble_and_the_heart_goes_on() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        bench.queue.away = True
        await until(lambda: bench.num_troubles > 1)
        bench.queue.away = False
        await until(lambda: bench.queue.heartbeats)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_heartbeat_without_an_answer_is_given_up_in_time_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(lease_ms=60)
    num_asked = 0

    async def ask(report: WorkerReport) -> HeartbeatReply:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            await asyncio.Event().wait()  # for ever
        bench.queue.heartbeats.append(report)
        return HeartbeatReply()

    bench.queue.heartbeat = ask  # type: ignore[method-assign]
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        await until(lambda: bench.queue.heartbeats)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert bench.num_troubles == 2
    assert caplog.text.count("a heartbeat was not delivered") == 1


async def test_a_loop_that_stalled_for_half_a_lease_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(lease_ms=40)
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        await until(lambda: bench.queue.heartbeats)
        num_heartbeats = len(bench.queue.heartbeats)
        time.sleep(0.1)  # noqa: ASYNC251 - what must not happen, on purpose
        await until(lambda: len(bench.queue.heartbeats) > num_heartbeats)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert "the worker's event loop was blocked" in caplog.text


async def test_what_tenants_spent_is_reported_once_and_again_where_the_store_was_away() -> None:
    bench = Bench()
    bench.spent_us.update(a=5, b=7)
    bench.queue.away = True
    with pytest.raises(TransportError):
        await bench.heartbeat.send()
    bench.spent_us["a"] += 1
    bench.queue.away = False
    for _ in range(2):
        await bench.heartbeat.send()
    assert [list(report.spent) for report in bench.queue.heartbeats] == [
        [Spent("a", 6), Spent("b", 7)],
        [],
    ]
