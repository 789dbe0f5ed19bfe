"""ReturnedJobs: gives jobs back to the queue, where any worker continues them from their tokens.

Those of an engine that died go with the blame, before all others: in Redis a later report would be
one of an earlier attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shared.keys import partition_of
from shared.partitions import by_partition
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import CrashCause, Delivery, JobQueue
from worker.running_jobs import RunningJob, RunningJobs

HAND_BACK_S = 3.0  # for the last commands to a store that may be unreachable
RECONCILE_INTERVAL_S = 2.0  # between checks for lost deliveries

log = logging.getLogger(__name__)


class ReturnedJobs:
    """The jobs of one worker that another one is to continue."""

    def __init__(self, queue: JobQueue, worker_id: str) -> None:
        self._queue = queue
        self._worker_id = worker_id
        # (job id, attempt) of jobs whose engine died, with its cause, until Redis has both.
        self._deaths: list[tuple[Sequence[tuple[str, int]], CrashCause]] = []

    async def died(self, jobs: Sequence[RunningJob], cause: CrashCause) -> None:
        """Returns the jobs of an engine that died.

        Redis counts the death against them, by its cause: a job that repeats it is ended.
        """
        if jobs:
            log.warning("returning jobs to the queue", extra={"num_jobs": len(jobs)})
            attempts = [(running.job.job_id, running.attempt) for running in jobs]
            groups = by_partition(job_id for job_id, _ in attempts)
            self._deaths += [([attempts[at] for at in ats], cause) for ats in groups.values()]
        try:
            await self._blame()
        except TransportError as error:
            # Redis still assigns them to this worker: reconciling takes them up again.
            log.warning("failed to return jobs to the queue", extra={"error": str(error)})

    async def release_lost(self, jobs: RunningJobs) -> None:
        """Releases, until cancelled, jobs that this worker has claimed and does not run.

        The last pull may have claimed them without a reply, or their logs differ from this worker's
        copies. While this worker has a lease, no other one may take them.
        """
        while True:
            try:
                await self._blame()
                await self._release_unknown(jobs.ids)
            except TransportError as error:
                log.debug("failed to release lost deliveries", extra={"error": str(error)})
            await asyncio.sleep(RECONCILE_INTERVAL_S)

    async def release_preempted(self, jobs: Sequence[RunningJob]) -> None:
        """Releases jobs that waited for a slot since they were preempted for a higher lane."""
        for running in jobs:
            job_id, num = running.job.job_id, running.num_lane_preemptions
            try:
                await self._queue.release(self._worker_id, job_id, running.attempt, num)
            except TransportError as error:
                # Redis still assigns it to this worker: reconciling takes it up again.
                log.warning(
                    "failed to return a preempted job to the queue",
                    extra={**running.log_fields, "error": str(error)},
                )

    async def leave(self, jobs: Sequence[RunningJob] = (), *, returns: bool = False) -> None:
        """Releases these jobs and those whose delivery was lost; then ends the lease.

        `returns`: see JobQueue.retire. Raises TransportError.
        """
        await self._blame()
        await self._release(jobs)
        await self._release_unknown(frozenset())
        await self._queue.retire(self._worker_id, returns=returns)

    async def leave_for_good(self, jobs: Sequence[RunningJob]) -> None:
        """Leaves as `leave` does, within HAND_BACK_S."""
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self.leave(jobs)
        except (TransportError, TimeoutError) as error:
            log.warning(
                "Redis is unavailable: others recover the jobs when this worker's lease ends",
                extra={"num_jobs": len(jobs), "error": str(error)},
            )
        if jobs:
            log.info("jobs returned to the queue", extra={"num_jobs": len(jobs)})

    async def _blame(self) -> None:
        """Reports the engine's deaths that Redis may not have yet. Raises TransportError.

        A cancelled or failed call leaves them to the next one: Redis ignores a repeat.
        """
        failed: dict[int, TransportError] = {}  # by partition: one may be away alone
        for death in list(self._deaths):
            partition = partition_of(death[0][0][0])
            if partition in failed:
                continue
            try:
                await self._queue.crashed(self._worker_id, *death)
            except TransportError as error:
                failed[partition] = error
                continue
            if death in self._deaths:  # not removed by another call meanwhile
                self._deaths.remove(death)
        if failed:
            raise next(iter(failed.values()))

    async def _release_unknown(self, known: frozenset[str]) -> None:
        """Releases claimed jobs that are not in `known`. Raises TransportError.

        Other errors are logged: they must not end a drain while jobs run.
        """
        try:
            lost = await self._queue.reconcile(self._worker_id, known)
        except TransportError:
            raise
        except Exception:
            log.exception("failed to read lost deliveries")
            return
        await self._release(lost)

    async def _release(self, jobs: Sequence[RunningJob | Delivery]) -> None:
        for item in jobs:
            await self._queue.release(self._worker_id, item.job.job_id, item.attempt)
