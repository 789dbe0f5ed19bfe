"""Heartbeat: renews the worker's lease, reports its load, hears which jobs to drop.

A worker whose engine makes no progress although it has jobs stops beating, so that its lease ends
and others take the jobs over: being able to talk is not being able to work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shared.transport.base import Beat, JobQueue, TransportError
from worker.running_jobs import RunningJobs

log = logging.getLogger(__name__)


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
        on_trouble: Callable[[], None],
    ) -> None:
        """`on_drop(job_id, attempt)`: the attempt that the beat spoke of is not ours any more."""
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
        self._on_trouble = on_trouble
        self._failing = False
        self.draining = False

    async def beat(self) -> None:
        """One beat. Raises TransportError."""
        attempts = {running.job.job_id: running.attempt for running in self._jobs}
        dropped = await self._queue.beat(
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
        for job_id in dropped:
            if job_id in attempts:
                self._on_drop(job_id, attempts[job_id])

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._is_lost() and len(self._jobs):
                continue
            try:
                await self.beat()
                self._failing = False
            except TransportError as error:
                self._on_trouble()
                if not self._failing:
                    log.warning("a heartbeat was not delivered", extra={"error": str(error)})
                self._failing = True
