"""Intake: takes jobs from the queue while the engine has room, recovered ones first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from shared.transport.base import Delivery, JobQueue, TransportError
from worker.intake_room import Oversubscription
from worker.running_jobs import RunningJobs

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
LOOK_S = 0.1  # blocks come free without a word

log = logging.getLogger(__name__)


class Intake:
    """The pull loop. Waiting work stays in the queue, where another worker can take it.

    Lost deliveries (a reply that never arrived) are looked for at the start, every
    `reconcile_interval_s`, and as soon as anybody calls `suspect`.
    """

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        jobs: RunningJobs,
        admit: Callable[[Sequence[Delivery]], Awaitable[None]],
        repair: Callable[[], Awaitable[None]],
        *,
        room: Callable[[], int],
        oversubscription: Callable[[], Oversubscription | None] = lambda: None,
        engine_up: asyncio.Event,
        engine_failing: Callable[[], bool],
        pull_block_ms: int,
        reconcile_interval_s: float,
    ) -> None:
        """`admit` returns when the deliveries are in the table; `repair` sets the store up again
        after trouble and may raise TransportError; `room` returns how many choices to take now,
        `oversubscription` what to take when that is 0.

        `engine_failing`: the device failed and has given no token since. Until it has, jobs are
        taken one at a time, and those that were there at several failures only when no other waits.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._jobs = jobs
        self._admit = admit
        self._repair = repair
        self._room = room
        self._oversubscription = oversubscription
        self._engine_up = engine_up
        self._engine_failing = engine_failing
        self._nothing_waits = False
        self._pull_block_ms = pull_block_ms
        self._reconcile_interval_s = reconcile_interval_s
        self._reconcile_at_s = 0.0
        self._broken = False

    def suspect(self) -> None:
        """A delivery may be lost: look for it before the next pull."""
        self._reconcile_at_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            await self._engine_up.wait()
            try:
                if self._broken:
                    await self._repair()
                    self._broken = False
                    log.info("the queue can be reached again")
                await self._round()
                failures = 0
            except TransportError as error:
                if not self._broken:
                    log.warning("the queue cannot be reached", extra={"error": str(error)})
                self._broken = True
                self.suspect()
                await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1

    async def _round(self) -> None:
        if time.monotonic() >= self._reconcile_at_s:
            # Before the call: whoever suspects something meanwhile is heard.
            self._reconcile_at_s = time.monotonic() + self._reconcile_interval_s
            lost = await self._queue.reconcile(self._worker_id, self._jobs.ids)
            if lost:
                log.info("lost deliveries found", extra={"num_jobs": len(lost)})
                await self._take(lost)
        room = self._places()
        if room == 0:
            if not self._engine_failing():
                await self._oversubscribe()
            await self._wait_for_room()
            return
        suspects = self._nothing_waits or not self._engine_failing()
        recovered = await self._queue.recover(self._worker_id, room, suspects=suspects)
        if recovered:
            log.info("jobs recovered", extra={"num_jobs": len(recovered)})
            await self._take(recovered)
            room = self._places()
        if room == 0:
            return
        pulled = await self._queue.pull(self._worker_id, room, self._pull_block_ms)
        self._nothing_waits = not (recovered or pulled)
        if pulled:
            await self._take(pulled)

    async def _oversubscribe(self) -> None:
        """Takes jobs that the engine finds seats for, of those who hold few; recovered ones first.

        Else a worker whose places never come free would leave the jobs of a dead one to their
        deadlines.
        """
        more = self._oversubscription()
        if more is None:
            return
        taken = await self._queue.recover(self._worker_id, more.count)
        if not taken:
            taken = await self._queue.oversubscribe(self._worker_id, more.count, more.leave_out)
        if taken:
            await self._take(taken)

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        if self._engine_up.is_set():
            await self._admit(deliveries)
            return
        # The engine died while we asked. Its successor may take minutes to load: others go first.
        for delivery in deliveries:
            await self._queue.release(self._worker_id, delivery.job.job_id, delivery.attempt)

    def _places(self) -> int:
        """Choices to take now; while the device has to show that it works, one job at a time."""
        room = self._room()
        if self._engine_failing():
            return min(room, 0 if self._jobs.num_in_engine else 1)
        return room

    async def _wait_for_room(self) -> None:
        self._jobs.changed.clear()
        if self._places():
            return
        wait_s = max(0.0, self._reconcile_at_s - time.monotonic())
        if self._jobs.room or self._oversubscription() is not None:
            wait_s = min(wait_s, LOOK_S)
        try:
            await asyncio.wait_for(self._jobs.changed.wait(), wait_s)
        except TimeoutError:
            return
