"""AcceptedJobs: jobs that this frontend accepted and that have no reader, until they have ended.

An open stream notices that the server has lost its job. A background job is known only to the
frontend that accepted it, and to its worker once it runs. Both put it back: the worker within a
heartbeat, this frontend where no worker does.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shared.messages import TERMINAL_STATES, Job, JobState
from shared.partitions import by_partition
from shared.transport.ports.admission import QueueFull, SubmittingStore
from shared.transport.ports.jobs import MAX_BLIND_S, PATIENCE_S, Restored, TransportError

log = logging.getLogger(__name__)

MAX_JOBS = 10_000
MAX_BYTES = 64 * 2**20
PAGE = 100  # jobs looked at in a round; one comes each second
DURABLE_S = 3.0  # after which a server with `appendfsync everysec` has it on disk
_decoder = msgspec.json.Decoder(Job)


@dataclass(slots=True)
class _Accepted:
    job: bytes  # JSON: much smaller than its tuple of prompt tokens
    accepted_s: float
    due_s: float  # its deadline
    seen_s: float  # when the server had it last
    missing_s: float | None = None  # since when it does not


class AcceptedJobs:
    """Jobs, bounded in number and bytes: the oldest is forgotten first. One task calls `look`."""

    def __init__(self, store: SubmittingStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._jobs: OrderedDict[str, _Accepted] = OrderedDict()  # those looked at last are last
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Remembers a job that the server has just accepted."""
        now_s = self._clock()
        accepted = _Accepted(
            job=msgspec.json.encode(job),
            accepted_s=now_s,
            due_s=now_s + job.timeout_ms / 1000,
            seen_s=now_s,
        )
        self._forget(job.job_id)
        self._jobs[job.job_id] = accepted
        self._num_bytes += len(accepted.job)
        while len(self._jobs) > MAX_JOBS or self._num_bytes > MAX_BYTES:
            self._forget(next(iter(self._jobs)))

    async def look(self) -> None:
        """Looks at the next PAGE jobs; queues those again that the server has lost. Raises
        TransportError."""
        page = list(self._jobs)[:PAGE]
        failed: TransportError | None = None
        for indexes in by_partition(page).values():  # one may be away alone
            try:
                await self._look([page[index] for index in indexes])
            except TransportError as error:
                failed = error
        if failed is not None:
            raise failed

    async def _look(self, page: Sequence[str]) -> None:
        """Looks at jobs of one partition; their turn is over in any case. Raises TransportError."""
        looked_s = self._clock()
        for job_id in page:
            self._jobs.move_to_end(job_id)
        for job_id, state in zip(page, await self._store.states(page), strict=True):
            accepted = self._jobs.get(job_id)
            if accepted is None:
                continue
            if state is None:
                await self._missed(job_id, accepted, looked_s)
            else:
                self._seen(job_id, accepted, state, looked_s)

    def _seen(self, job_id: str, accepted: _Accepted, state: JobState, looked_s: float) -> None:
        accepted.seen_s, accepted.missing_s = looked_s, None
        # A job that ended at once may be lost together with its end, and then runs again.
        is_durable = looked_s - accepted.accepted_s > DURABLE_S
        if state is JobState.CANCELLED or (state in TERMINAL_STATES and is_durable):
            self._forget(job_id)

    async def _missed(self, job_id: str, accepted: _Accepted, looked_s: float) -> None:
        if looked_s - accepted.seen_s > MAX_BLIND_S:
            log.warning(
                "a job's record is missing; it may have ended and expired", extra={"job_id": job_id}
            )
            self._forget(job_id)
            return
        if accepted.missing_s is None:
            accepted.missing_s = looked_s
        if looked_s - accepted.missing_s < PATIENCE_S:
            return
        left_ms = round((accepted.due_s - self._clock()) * 1000)
        try:
            restored = await self._store.submit_again(_decoder.decode(accepted.job), left_ms)
        except QueueFull:  # Redis is above maxmemory
            return
        if restored is Restored.RESTORED:
            log.warning("resubmitted a job that Redis had lost", extra={"job_id": job_id})
            accepted.seen_s, accepted.missing_s = looked_s, None
            accepted.accepted_s = looked_s
        else:
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        accepted = self._jobs.pop(job_id, None)
        if accepted is not None:
            self._num_bytes -= len(accepted.job)
