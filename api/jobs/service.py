"""JobService: submits the jobs of routes and relays their events.

EventRelay opens the stream of a job; DisconnectTracker ends jobs whose clients have left.

SUBMITS_JOB: a route subscribes to the events of its job while it prepares it. The server mostly has
confirmed the subscription by the time of the submit, which waits for that.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Protocol

import anyio
from fastapi import Depends
from prometheus_client import Counter, Histogram
from starlette.requests import Request

from api.dependencies import provided
from api.generation.formatter import PromptScores
from api.http.caller import caller_in
from api.http.open_requests import OpenRequests, TimeSlices
from api.http.shares import Pot
from api.jobs.admission import Admission
from api.jobs.event_stream import JobStream, RelayCounts
from api.jobs.quiet_streams import MissingEnd, QuietStreams
from shared.messages import Cursor, ErrorCode, OnDisconnect
from shared.outages import OF_STORE_OUTAGE
from shared.transport.ports.jobs import (
    PATIENCE_S,
    EventBus,
    JobStore,
    Restored,
    Submitted,
    Subscription,
    TransportError,
)

log = logging.getLogger(__name__)


class JobMetrics(Protocol):
    """What jobs and their responses count: a part of `api.metrics.Metrics`."""

    requests: Counter
    ttft_s: Histogram
    inter_token_s: Histogram
    e2e_s: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    disconnects: Counter
    batch_rows: Counter
    cancels_by_request: int


@dataclass(frozen=True)
class JobService:
    """The parts of one frontend that jobs go through; made once in `api.services`.

    `frontend_id` contains a UUID and is never reused. `keepalive_s`: seconds of silence after which
    a stream gets a keep-alive comment. `answers`: bytes of whole answers that are not sent yet.
    """

    frontend_id: str
    store: JobStore
    admission: Admission
    relay: EventRelay
    disconnects: DisconnectTracker
    open_requests: OpenRequests
    slices: TimeSlices
    metrics: JobMetrics
    keepalive_s: float
    answers: Pot
    _reader_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    async def cancel(self, job_id: str) -> bool:
        """Cancels a job on request. Returns False if it does not exist. Raises TransportError."""
        result = await self.store.cancel(job_id, ErrorCode.CANCELLED)
        if result is not None and result.won:
            self.metrics.cancels_by_request += 1
        return result is not None

    def new_reader_id(self) -> str:
        """Returns the name of one reader of a job. The part before '#' names the frontend whose
        lease the reader lives by."""
        return f"{self.frontend_id}#{next(self._reader_numbers)}"


JobsDep = Annotated[JobService, provided(JobService)]


async def expect_job(request: Request, jobs: JobsDep) -> AsyncIterator[None]:
    """Subscribes to the events of the job that the request is named by; waits for nothing.

    Runs once the body has been read; the request may still be refused.
    """
    job_id = caller_in(request.scope).job_id
    assert job_id is not None, "this route submits jobs"
    async with jobs.relay.expecting(job_id):
        yield


# The dependencies of a route that submits a job.
SUBMITS_JOB = [Depends(expect_job)]


class EventRelay:
    """Opens streams over one store and one bus, and looks after those that receive nothing."""

    def __init__(
        self,
        store: JobStore,
        bus: EventBus,
        *,
        silence_s: float = 1.0,
        outage_s: float = 30.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Takes times in seconds: `silence_s` without an event until a stream's job is looked at,
        `outage_s` without the store until it is interrupted, `patience_s` without its job until it
        ends as `job_lost`."""
        self._store = store
        self._bus = bus
        self._patience_s = patience_s
        self._outage_s = outage_s
        self._quiet = QuietStreams(store, silence_s=silence_s, outage_s=outage_s)
        self._expected: dict[str, list[Subscription]] = {}  # by job id; not confirmed yet
        self.counts = RelayCounts()

    async def aclose(self) -> None:
        """Stops looking after streams that are still open. Idempotent."""
        await self._quiet.aclose()

    @asynccontextmanager
    async def expecting(self, job_id: str) -> AsyncIterator[None]:
        """Begins to subscribe, for an `open` within the context that submits the job."""
        subscription = await self._bus.begin(job_id)
        waiting = self._expected.setdefault(job_id, [])
        waiting.append(subscription)
        try:
            yield
        finally:
            if subscription in waiting:
                self._forget(job_id, subscription)
                await self._bus.unsubscribe(subscription)

    def _forget(self, job_id: str, subscription: Subscription) -> None:
        waiting = self._expected[job_id]
        waiting.remove(subscription)
        if not waiting:
            del self._expected[job_id]

    async def open(
        self,
        job_id: str,
        after: Cursor,
        submit: Callable[[], Awaitable[object]] | None = None,
        resubmit: Callable[[], Awaitable[Restored]] | None = None,
        prompt: PromptScores | None = None,
    ) -> JobStream:
        """Subscribes, then submits. Raises TransportError, and the errors of `submit`.

        Where `submit` returns ACCEPTED the job is new: a subscription that was confirmed before it
        has missed nothing, and the log is not read. `resubmit` queues the job once more where the
        store has lost it before it gave anything. `prompt` receives the log probabilities of the
        job's prompt before the stream gives anything.
        """
        if submit is not None and job_id in self._expected:
            subscription = self._expected[job_id][0]
            self._forget(job_id, subscription)
            await self._bus.confirmed(subscription)
        else:
            subscription = await self._bus.subscribe(job_id)
        must_catch_up = False
        try:
            if submit is not None:
                await subscription.get(0.0)  # the RESYNC of the confirmation; later ones stay
                must_catch_up = await submit() is not Submitted.ACCEPTED
        except BaseException:
            await self._bus.unsubscribe(subscription)
            raise
        stream = JobStream(
            job_id,
            after,
            self._store,
            self._bus,
            subscription,
            self.counts,
            MissingEnd(job_id, self._store, resubmit, self._patience_s),
            self._outage_s,
            is_behind=must_catch_up,
            prompt=prompt,
        )
        self._quiet.add(stream)
        return stream


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
