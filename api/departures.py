"""Departures: what becomes of a job when a reader leaves it, made sure of when Redis is away."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

import anyio

from shared.messages import OnDisconnect
from shared.transport.base import JobStore, TransportError

log = logging.getLogger(__name__)

NOW_S = 2.0  # that a leaving reader's own task may take
KEEP_TRYING_S = 60.0
MAX_PENDING = 10_000  # the oldest is given up; frontend lease and deadline end such a job


class Departures:
    """Cancels are tried at once and again until they were heard or are too old to matter."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._pending: OrderedDict[str, float] = OrderedDict()  # job id -> when to give up
        self._attached: dict[str, str] = {}  # reader id -> job id
        self.num_cancelled = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def left(self, job_id: str, reader_id: str, policy: OnDisconnect) -> None:
        """The client of the job's own response went away. Never raises TransportError."""
        if policy is OnDisconnect.CANCEL:
            await self.cancel(job_id)
        elif policy is OnDisconnect.GRACE:
            await self._detach(job_id, reader_id)

    async def cancel(self, job_id: str) -> None:
        """Cancels as disconnected, now or as soon as the store can be reached."""
        self._pending[job_id] = time.monotonic() + KEEP_TRYING_S
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
        await self._try(job_id)

    async def delivered(self, job_id: str, reader_id: str) -> None:
        """The job's reader has seen its end: the store may forget the text sooner."""
        await self._detach(job_id, reader_id)

    def watch(self, job_id: str, reader_id: str, policy: OnDisconnect) -> None:
        """This reader says that it is there, each second, until `unwatch`.

        For a job that goes on without any reader nothing needs to be said.
        """
        if policy is OnDisconnect.CONTINUE:
            return
        self._attached[reader_id] = job_id

    def unwatch(self, reader_id: str) -> None:
        self._attached.pop(reader_id, None)

    async def retry(self) -> None:
        """One round: a sign of life for each watched reader, and pending cancels again.

        Several readers of a job do not know of each other; the one that stays says so here before
        the grace period that the other's leaving, or its frontend's death, started has passed.
        """
        if self._attached:
            readers = [(job_id, reader_id) for reader_id, job_id in self._attached.items()]
            await self._store.attach(readers)
        for job_id in list(self._pending):
            await self._try(job_id)

    async def _try(self, job_id: str) -> None:
        try:
            with anyio.fail_after(NOW_S):
                await self._store.cancel(job_id, "disconnected")
        except (TransportError, TimeoutError) as error:
            if time.monotonic() > self._pending.get(job_id, 0.0):
                self._pending.pop(job_id, None)
                log.error("cancel given up", extra={"job_id": job_id, "reason": str(error)})
            return
        self._pending.pop(job_id, None)
        self.num_cancelled += 1

    async def _detach(self, job_id: str, reader_id: str) -> None:
        self.unwatch(reader_id)
        try:
            with anyio.fail_after(NOW_S):
                await self._store.detach(job_id, reader_id)
        except (TransportError, TimeoutError) as error:
            # Its lease or deadline ends the job, its retention the text.
            log.warning("detach failed", extra={"job_id": job_id, "reason": str(error)})
