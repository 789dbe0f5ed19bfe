"""Heartbeat: renews the worker's lease, reports its load, hears which jobs to drop.

A worker whose engine makes no progress although it has jobs stops beating, so that its lease ends
and others take the jobs over: being able to talk is not being able to work. Why this is a task of
the service's loop and no thread is docs/adr/0010.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from shared.outage_log import OutageLog
from shared.transport.base import Beat, JobQueue, TransportError
from worker.running_jobs import RunningJobs

log = logging.getLogger(__name__)

LATE_SHARE = 0.5  # of a lease: a beat that comes so late is worth a warning


class Heartbeat:
    """Beats every `interval_s` until cancelled; `beat` may be called in between."""

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        models: tuple[str, ...],
        jobs: RunningJobs,
        *,
        lease_ms: int,
        interval_s: float,
        stats: Callable[[], Mapping[str, float | str]],
        is_stalled: Callable[[], bool],
        is_lost: Callable[[], bool],
        on_drop: Callable[[str, int], None],
        on_lost: Callable[[str, int], None],
        on_sure: Callable[[Iterable[str], float], None],
        on_trouble: Callable[[], None],
    ) -> None:
        """`on_drop(job_id, attempt)`: the attempt that the beat spoke of is not ours any more.

        `on_lost(job_id, attempt)`: the server does not have it. `on_sure(job_ids, since_s)`: the
        server had these at that time (monotonic) or later.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._models = models
        self._jobs = jobs
        self._lease_ms = lease_ms
        self._interval_s = interval_s
        self._stats = stats
        self._is_stalled = is_stalled
        self._is_lost = is_lost
        self._on_drop = on_drop
        self._on_lost = on_lost
        self._on_sure = on_sure
        self._on_trouble = on_trouble
        # An answer that takes so long is not waited for: there is time for two more tries.
        self._timeout_s = lease_ms / 1000 / 3
        self._outage = OutageLog(
            log, away="a heartbeat was not delivered", back="heartbeats are delivered again"
        )
        self.draining = False

    async def beat(self) -> None:
        """One beat. Raises TransportError."""
        attempts = {running.job.job_id: running.attempt for running in self._jobs}
        begin_s = time.monotonic()
        reply = await self._queue.beat(
            Beat(
                worker_id=self._worker_id,
                lease_ms=self._lease_ms,
                models=self._models,
                stats=self._stats(),
                running=tuple(attempts.items()),
                draining=self.draining,
                stalled=self._is_stalled(),
            )
        )
        self._on_sure(attempts.keys() - {*reply.dropped, *reply.lost}, begin_s)
        for job_id in reply.dropped:
            if job_id in attempts:
                self._on_drop(job_id, attempts[job_id])
        for job_id in reply.lost:
            if job_id in attempts:
                self._on_lost(job_id, attempts[job_id])

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._pause()
            if self._is_lost() and len(self._jobs):
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self.beat()
                self._outage.works()
            except (TransportError, TimeoutError) as error:
                self._on_trouble()
                self._outage.failed(error=str(error) or type(error).__name__)

    async def _pause(self) -> None:
        """An interval's sleep. Says so when the loop stood still for a good part of a lease."""
        begin_s = time.monotonic()
        await asyncio.sleep(self._interval_s)
        late_s = time.monotonic() - begin_s - self._interval_s
        if late_s * 1000 > LATE_SHARE * self._lease_ms:
            log.warning("the service stood still", extra={"late_s": round(late_s, 2)})
