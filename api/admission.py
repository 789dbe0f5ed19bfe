"""Admission: a job is in the queue exactly once, or the caller is told why not."""

from __future__ import annotations

import asyncio
import logging

from api.departures import Departures
from api.errors import queue_full, store_unreachable
from shared.messages import Job
from shared.transport.base import AdmissionLimits, JobStore, QueueFull, TransportError

log = logging.getLogger(__name__)

SECOND_TRY_AFTER_S = 0.1


class Admission:
    """Submits under one frontend's name and limits."""

    def __init__(
        self, store: JobStore, limits: AdmissionLimits, frontend_id: str, departures: Departures
    ) -> None:
        self._store = store
        self._limits = limits
        self._frontend_id = frontend_id
        self._departures = departures

    async def submit(self, job: Job) -> None:
        """Returns when the job is queued. Raises UnavailableError when it is not.

        A submit whose answer got lost may have been heard: it is repeated once under the same id,
        which is safe, and cancelled when that fails too.
        """
        try:
            try:
                await self._store.submit(job, self._limits, self._frontend_id)
            except QueueFull:
                raise
            except TransportError:
                await asyncio.sleep(SECOND_TRY_AFTER_S)
                await self._store.submit(job, self._limits, self._frontend_id)
        except QueueFull as error:
            raise queue_full(error) from error
        except TransportError as error:
            log.warning("submit failed", extra={"job_id": job.job_id, "reason": str(error)})
            await self._departures.cancel(job.job_id)
            raise store_unreachable(error) from error
