"""A worker that is stopped: jobs whose delivery was lost, and an engine that dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.messages import START
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Append, AppendResult, CrashCause, Delivery
from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue, make_job
from worker.checkpoint import find_checkpoint
from worker.service import WorkerService
from worker.settings import WorkerSettings


class LosesReplies(FakeQueue):
    """Delivers one job; then claims the others and does not reply: `reconcile` has them."""

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        if self.calls.count("pull") == 0:
            return await super().pull(worker_id, 1, block_ms)
        self._called("pull")
        self.lost += self.deliveries
        self.deliveries.clear()
        await asyncio.Event().wait()
        return []


class DrainReconcileFails(LosesReplies):
    """`reconcile` fails during a drain, with an error that is not of the connection."""

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        await super().reconcile(worker_id, known)
        if self.heartbeats[-1].draining:
            raise ValueError("a record cannot be read")
        return []


class BlamesLate(FakeQueue):
    """The first `crashed` hangs, or fails; until one is applied, `reconcile` has its jobs."""

    def __init__(self, hangs: bool) -> None:
        super().__init__()
        self.hangs = hangs
        self.num_ends = 0
        self.ends_gate = asyncio.Event()  # appends with a job's end wait for it

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        num_ends = sum(item.end_of_job is not None for item in items)
        if num_ends:
            self.num_ends += num_ends
            await self.ends_gate.wait()
        return await super().append(worker_id, lease_ms, items)

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        if "crashed" not in self.calls:
            self._called("crashed")
            self.lost += [Delivery(make_job(job_id), attempt + 1) for job_id, attempt in jobs]
            if not self.hangs:
                raise TransportError("the store is away")
            await asyncio.Event().wait()
        self.lost.clear()
        await super().crashed(worker_id, jobs, cause)


def _service(queue: FakeQueue) -> WorkerService:
    settings = WorkerSettings(
        redis_url="unix:///unused",
        runner="echo",
        echo_step_ms=100,
        drain_timeout_s=60,
    )
    deployment: Any = NoDeployment()
    return WorkerService(settings, find_checkpoint("", "m"), queue, _check, deployment)


class NoDeployment:
    """Nobody looks."""

    async def report(self, *arguments: Any) -> None:
        raise TransportError("the store is away")


async def _check() -> Sequence[str]:
    return []


async def test_jobs_that_do_not_run_are_released_during_the_drain() -> None:
    queue = LosesReplies()
    service = _service(queue)
    queue.deliveries += [Delivery(make_job(f"0-{name}"), 1, end=START) for name in ("runs", "lost")]
    async with _running(service) as running:
        await until(lambda: queue.lost and queue.appended)
        service.stop()
        await until(lambda: queue.released == [("0-lost", 1)])
        queue.lost.append(Delivery(make_job("0-diverged"), 2))  # found during the drain
        await until(lambda: queue.released == [("0-lost", 1), ("0-diverged", 2)])
        assert not running.done()  # the other job may finish
        service.stop()
        assert await asyncio.wait_for(running, 10) == 0
        assert queue.released == [("0-lost", 1), ("0-diverged", 2), ("0-runs", 1)]


async def test_a_drain_goes_on_when_lost_deliveries_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = DrainReconcileFails()
    service = _service(queue)
    queue.deliveries.append(Delivery(make_job("0-runs"), 1, end=START))
    async with _running(service) as running:
        await until(lambda: queue.appended)
        service.stop()
        await until(lambda: caplog.text.count("a record cannot be read") > 1)
        assert not running.done()
        service.stop()
        assert await asyncio.wait_for(running, 10) == 0
        assert queue.released == [("0-runs", 1)]
        assert queue.retired


@pytest.mark.parametrize("hangs", [True, False])
async def test_an_engine_that_dies_during_a_drain_is_blamed_on_its_jobs(hangs: bool) -> None:
    queue = BlamesLate(hangs)
    service = _service(queue)
    queue.deliveries.append(Delivery(make_job("0-runs"), 1, end=START))
    async with _running(service) as running:
        await until(lambda: queue.appended)
        service.stop()
        await until(lambda: queue.heartbeats[-1].draining)
        _kill_engine(service)
        assert await asyncio.wait_for(running, 10) == 0
        assert (queue.blamed, queue.released) == ([("0-runs", 1)], [])
        assert queue.retired


@pytest.mark.parametrize("hangs", [True, False])
async def test_its_jobs_are_blamed_while_the_drain_goes_on(hangs: bool) -> None:
    queue = BlamesLate(hangs)
    service = _service(queue)
    queue.deliveries.append(Delivery(make_job("0-runs"), 1, end=START))
    async with _running(service) as running:
        await until(lambda: queue.appended)
        queue.deliveries.append(Delivery(make_job("0-ends", max_tokens=1), 1, end=START))
        await until(lambda: queue.num_ends)  # it stays in the table
        service.stop()
        await until(lambda: queue.heartbeats[-1].draining)
        _kill_engine(service)
        await until(lambda: queue.blamed or queue.released)
        assert not running.done()
        queue.ends_gate.set()
        assert await asyncio.wait_for(running, 10) == 0
        assert (queue.blamed, queue.released) == ([("0-runs", 1)], [])


@asynccontextmanager
async def _running(service: WorkerService) -> AsyncIterator[asyncio.Task[int]]:
    running = asyncio.create_task(service.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait([running])


def _kill_engine(service: WorkerService) -> None:
    pid = service._supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
