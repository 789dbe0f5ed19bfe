"""A worker that is stopped while a pull is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.messages import START
from shared.transport.ports.queue import Delivery
from tests.unit.worker.fakes import FakeQueue, make_job, until
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


async def _check() -> Sequence[str]:
    return []


async def test_jobs_that_do_not_run_are_released_during_the_drain() -> None:
    settings = WorkerSettings(
        redis_url="fake://",
        runner="echo",
        echo_step_ms=100,
        drain_timeout_s=60,
        reconcile_interval_s=0.1,
    )
    queue = LosesReplies()
    checkpoint = find_checkpoint("", "m")
    service = WorkerService(settings, checkpoint, queue, _check)
    queue.deliveries += [Delivery(make_job(f"0-{name}"), 1, end=START) for name in ("runs", "lost")]
    running = asyncio.create_task(service.run())
    try:
        await until(lambda: queue.lost and queue.appended, 30.0)
        service.stop()
        await until(lambda: queue.released == [("0-lost", 1)])
        queue.lost.append(Delivery(make_job("0-diverged"), 2))  # found during the drain
        await until(lambda: queue.released == [("0-lost", 1), ("0-diverged", 2)])
        assert not running.done()  # the other job may finish
        service.stop()
        assert await asyncio.wait_for(running, 10) == 0
        assert queue.released == [("0-lost", 1), ("0-diverged", 2), ("0-runs", 1)]
    finally:
        running.cancel()
        await asyncio.wait([running])
