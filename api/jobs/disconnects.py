"""DisconnectTracker: cancels or detaches jobs on client disconnect; retries while Redis is away."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

import anyio

from shared.messages import OnDisconnect
from shared.outages import OF_STORE_OUTAGE
from shared.transport.ports.jobs import JobStore, TransportError

log = logging.getLogger(__name__)

NOW_S = 2.0  # limit for the task of a reader that leaves
KEEP_TRYING_S = 60.0
MAX_PENDING = 10_000  # the oldest is dropped; frontend lease and deadline end such a job
ATTACH_ROUNDS = 4  # calls of `attach_some` in which each reader attaches once

Reader = tuple[str, str]  # job id, reader id


class DisconnectTracker:
    """Cancels jobs at once, and again until the store has confirmed it or KEEP_TRYING_S passed."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._pending: OrderedDict[str, float] = OrderedDict()  # job id -> when to give up
        # By reader id, in groups that attach in turn: the work is spread over time.
        self._attached: tuple[dict[str, Reader], ...] = tuple({} for _ in range(ATTACH_ROUNDS))
        self._round = 0  # whose group is next
        self._has_missed = False  # a round failed: the next one is for all readers
        self.num_cancelled = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def left(self, job_id: str, reader_id: str, policy: OnDisconnect) -> None:
        """Applies the job's `on_disconnect` policy after its submitting client disconnected.

        Never raises TransportError: a cancel is retried, a detach that fails is logged.
        """
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
        """Detaches a reader that has received the job's end: the store may drop the text sooner."""
        await self._detach(job_id, reader_id)

    def watch(self, job_id: str, reader_id: str, policy: OnDisconnect) -> None:
        """Attaches this reader, which has just attached, again and again until `unwatch`.

        A job that continues without readers needs no call.
        """
        if policy is OnDisconnect.CONTINUE:
            return
        last_group = self._attached[self._round - 1]  # whose turn comes last
        last_group[reader_id] = (job_id, reader_id)

    def unwatch(self, reader_id: str) -> None:
        """Ends `watch`. Idempotent."""
        for group in self._attached:
            group.pop(reader_id, None)

    async def attach_some(self) -> None:
        """Attaches a part of the readers: each one in ATTACH_ROUNDS calls, all of them after a
        call that failed. Raises TransportError.

        Several readers of a job do not know of each other: one that stays attaches before the grace
        period has passed that another's disconnect, or its frontend's death, started.
        """
        if self._has_missed:
            await self.attach_all()
            return
        group = self._attached[self._round]
        await self._attach([group])
        self._round = (self._round + 1) % ATTACH_ROUNDS

    async def attach_all(self) -> None:
        """Attaches every reader now. Raises TransportError."""
        await self._attach(self._attached)
        self._has_missed = False

    async def _attach(self, groups: Sequence[dict[str, Reader]]) -> None:
        readers = [reader for group in groups for reader in group.values()]
        if not readers:
            return
        try:
            await self._store.attach(readers)
        except BaseException:
            self._has_missed = True
            raise

    async def retry(self) -> None:
        """Tries the pending cancels again."""
        for job_id in list(self._pending):
            await self._try(job_id)

    async def _try(self, job_id: str) -> None:
        try:
            with anyio.fail_after(NOW_S):
                await self._store.cancel(job_id, "disconnected")
        except (TransportError, TimeoutError) as error:
            if time.monotonic() > self._pending.get(job_id, 0.0):
                self._pending.pop(job_id, None)
                log.error(
                    "gave up cancelling a job after its client disconnected",
                    extra={"job_id": job_id, "reason": str(error)},
                )
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
            extra = {"job_id": job_id, "reason": str(error), **OF_STORE_OUTAGE}
            log.warning("failed to record that a reader left", extra=extra)
