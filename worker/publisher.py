"""Publisher: appends every job's output to its log, in one round trip for all that is due.

Flush policy. When the last append was quick, whatever has accumulated is sent as soon as there is
something: no timer at low load. When appends are slow the publisher rests as long as the last one
took, at most `flush_interval_s`, and tokens wait for company. A job's first token, its end, and
`flush_tokens` waiting tokens do not wait.

While Redis is unavailable, output is buffered; `has_capacity` is cleared when one job has
`max_unflushed_tokens` unsent, and the engine's reader waits for it. If only the job's partition is
away, the job is put off instead: it continues from its log when the partition is back.

Slices of prompts go a few at a time, job by job in turn; no other job's tokens wait for their turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.backoff import Backoff
from shared.keys import partition_of
from shared.messages import (
    START,
    Cursor,
    ErrorCode,
    JobState,
    Usage,
)
from shared.outages import STORE, RateLimitedOutageLog
from shared.transport.ports.jobs import Restored, TransportError
from shared.transport.ports.queue import Append, AppendResult, AppendStatus, JobEnd, JobQueue
from worker.outbox import Outbox, Settled

MAX_GAPS = 3  # in a row, of one job
MAX_SLICES = 4  # of prompts, in one append: each may have 220 KiB, and all jobs' tokens wait
MIN_REST_S = 0.001  # shorter rests cost more in wake-ups than they gather
LEASE_WAIT_S = 0.05  # for the heartbeat that must come before a job is restored
MEMORY_WAIT_S = 1.0  # for a server above maxmemory to have room for a job that it has lost

RESTORE_WAITS_S = {Restored.NO_LEASE: LEASE_WAIT_S, Restored.NO_MEMORY: MEMORY_WAIT_S}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPolicy:
    """Bounds of an outbox's waiting and memory; see the module."""

    flush_interval_s: float
    flush_tokens: int
    max_unflushed_tokens: int

    def rest_s(self, append_s: float) -> float:
        """Returns the seconds to rest after an append that took `append_s`."""
        rest_s = min(append_s, self.flush_interval_s)
        return rest_s if rest_s >= MIN_REST_S else 0.0

    def is_urgent(self, outbox: Outbox) -> bool:
        """Returns True for a job's first token, its end and `flush_tokens` waiting tokens."""
        return outbox.is_first or outbox.ending or outbox.num_unsent >= self.flush_tokens


class Output(Protocol):
    """Where the output of running jobs goes."""

    def open(self, outbox: Outbox) -> None: ...
    def notice(self, outbox: Outbox) -> None: ...
    def drop(self, job_id: str) -> None: ...
    def sure(self, job_ids: Iterable[str], since_s: float) -> None: ...
    def lost(self, job_id: str, attempt: int) -> None: ...
    @property
    def num_unsent_total(self) -> int: ...
    @property
    def backlog_s(self) -> float: ...


class Publisher:
    """Sends the outboxes of the running jobs: those that were noticed to have something.

    Nothing but `run` and `flushed` waits.
    """

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        lease_ms: int,
        policy: FlushPolicy,
        *,
        on_settled: Callable[[Settled], None],
        on_rejected: Callable[[str, int], None],
        on_trouble: Callable[[], None],
        on_published: Callable[[float], None],
        on_put_off: Callable[[str, int], None],
    ) -> None:
        """`on_rejected(job_id, attempt)`: the job fails; its further tokens are not needed.

        `on_published` gets the seconds from the oldest output of an append to its confirmation.
        `on_trouble`: the connection failed or the log differed; deliveries may be lost.
        `on_put_off(job_id, attempt)`: this worker does not run the job any more.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._policy = policy
        self._on_settled = on_settled
        self._on_rejected = on_rejected
        self._on_trouble = on_trouble
        self._on_published = on_published
        self._on_put_off = on_put_off
        self._outboxes: dict[str, Outbox] = {}
        # Outboxes with something to send, oldest first; one that sent a slice goes to the end.
        self._waiting: dict[str, Outbox] = {}
        self._lost: dict[str, Outbox] = {}  # those whose jobs the server does not have any more
        self._restore_due = False  # else the lost jobs wait for `_restore_timer`
        self._restore_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._rest_until_s = 0.0
        self.has_capacity = asyncio.Event()
        self.has_capacity.set()
        self._outage = RateLimitedOutageLog(
            log,
            failing="Redis is unavailable; output is buffered",
            recovered="Redis is available again; output is written",
            of=STORE,
        )

    def open(self, outbox: Outbox) -> None:
        """Takes a job's outbox. A job with a snapshot is restored when Redis has lost it."""
        self._lost.pop(outbox.job_id, None)
        self._outboxes[outbox.job_id] = outbox

    def notice(self, outbox: Outbox) -> None:
        """Sends new output of an outbox, unless it has been settled or dropped meanwhile."""
        job_id = outbox.job_id
        if self._outboxes.get(job_id) is not outbox or job_id in self._lost:
            return
        if not outbox.has_something:
            return
        if job_id not in self._waiting:
            self._waiting[job_id] = outbox
            outbox.waiting_since_s = time.monotonic()
            self._wake.set()
            self._idle.clear()
        if not self._urgent.is_set() and self._policy.is_urgent(outbox):
            self._urgent.set()
        if outbox.num_unsent >= self._policy.max_unflushed_tokens:
            if self._queue.is_away(job_id):  # later: the caller is at work with the job
                asyncio.get_running_loop().call_soon(self._put_off_full)
            else:
                self.has_capacity.clear()

    def drop(self, job_id: str) -> None:
        """Drops a job; Settled does not follow. An append in flight may still arrive."""
        if self._outboxes.pop(job_id, None) is not None:
            self._waiting.pop(job_id, None)
            self._lost.pop(job_id, None)
            self._update()

    def sure(self, job_ids: Iterable[str], since_s: float) -> None:
        """Notes that the server had these attempts at `since_s` (monotonic) or later."""
        for job_id in job_ids:
            if (outbox := self._outboxes.get(job_id)) is not None:
                outbox.sure_s = max(outbox.sure_s, since_s)

    def lost(self, job_id: str, attempt: int) -> None:
        """Puts back an attempt that the server does not have, or settles it."""
        outbox = self._outboxes.get(job_id)
        if outbox is not None and outbox.attempt == attempt:
            self._note_lost(outbox)

    @property
    def num_unsent_total(self) -> int:
        """Tokens that are not durable yet. Any thread may read it."""
        return sum(outbox.num_unsent for outbox in list(self._waiting.values()))

    @property
    def backlog_s(self) -> float:
        """Age of the oldest output that is not durable yet, in seconds; 0.0 without any.
        Any thread may read it."""
        waiting = [*self._waiting.values(), *self._lost.values()]
        now_s = time.monotonic()
        return max((now_s - outbox.waiting_since_s for outbox in waiting), default=0.0)

    async def flushed(self) -> None:
        """Waits until all output is sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """Runs until cancelled."""
        backoff = Backoff(0.05, 1.0)
        while True:
            await self._wake.wait()
            try:
                if self._restore_due:
                    self._restore_due = False  # true again when one is lost meanwhile
                    await self._restore_lost()
                rested = await self._rest()
                outboxes = self._due(everything=rested)
                if not outboxes:
                    backoff.reset()
                    self._update()
                    continue
                begin_s = time.monotonic()
                items = [outbox.next_append() for outbox in outboxes]
                results = await self._queue.append(self._worker_id, self._lease_ms, items)
            except TransportError as error:
                self._restore_due = bool(self._lost)
                self._outage.failed(error=str(error))
                self._on_trouble()
                self._put_off_full()
                await backoff.wait()
                continue
            backoff.reset()
            self._outage.succeeded()
            oldest_s = min(outbox.waiting_since_s for outbox in outboxes)
            self._on_published(time.monotonic() - oldest_s)
            for outbox, item, result in zip(outboxes, items, results, strict=True):
                self._settle(outbox, item, result, begin_s)
            self._update()
            end_s = time.monotonic()
            self._rest_until_s = end_s + self._policy.rest_s(end_s - begin_s)

    def _put_off_full(self) -> None:
        """Drops the jobs whose partition alone is away and whose output has no more room."""
        limit = self._policy.max_unflushed_tokens
        for job_id, outbox in list(self._waiting.items()):
            if outbox.num_unsent >= limit and self._queue.is_away(job_id):
                self._on_put_off(job_id, outbox.attempt)
        self._update()

    async def _restore_lost(self) -> None:
        """Puts back jobs that the server has lost; one that cannot return is settled as GONE.

        A job that the server refuses for now stays lost; the output of the others continues.
        Raises TransportError.
        """
        wait_s = None
        for job_id, outbox in list(self._lost.items()):
            assert outbox.snapshot is not None, "see _note_lost"
            sure_ms = int((time.monotonic() - outbox.sure_s) * 1000)
            restored = await self._queue.restore(
                self._worker_id, job_id, outbox.attempt, outbox.snapshot, sure_ms
            )
            if self._lost.get(job_id) is not outbox:
                continue
            if restored in RESTORE_WAITS_S:
                wait_s = min(wait_s or MEMORY_WAIT_S, RESTORE_WAITS_S[restored])
                continue
            del self._lost[job_id]
            if restored is not Restored.RESTORED:
                self._close(outbox, AppendStatus.GONE, restored.value)
                continue
            log.warning(
                "restored a job that Redis had lost",
                extra={**outbox.log_fields, "end": str(outbox.cursor)},
            )
            # The log is empty or has what the server kept: the next append finds out.
            if not outbox.rewind(START):
                self._close(outbox, AppendStatus.DIVERGED)
            else:
                outbox.num_gaps = 0
                self.notice(outbox)
        self._cancel_timer()
        if wait_s is not None:
            self._restore_timer = asyncio.get_running_loop().call_later(wait_s, self._restore_soon)
        self._update()

    def _cancel_timer(self) -> None:
        if self._restore_timer is not None:
            self._restore_timer.cancel()
            self._restore_timer = None

    def _restore_soon(self) -> None:
        self._cancel_timer()
        self._restore_due = True
        self._wake.set()
        self._urgent.set()

    def _note_lost(self, outbox: Outbox, detail: str = "") -> None:
        if outbox.snapshot is None:
            self._close(outbox, AppendStatus.GONE, detail)
            return
        if self._lost.get(outbox.job_id) is outbox:
            return
        if self._waiting.pop(outbox.job_id, None) is None:
            outbox.waiting_since_s = time.monotonic()
        self._lost[outbox.job_id] = outbox
        self._idle.clear()
        self._restore_soon()

    async def _rest(self) -> bool:
        """Rests; returns True when the rest is over, False when something urgent ended it."""
        rest_s = self._rest_until_s - time.monotonic()
        if rest_s <= 0:
            return True
        try:
            async with asyncio.timeout(rest_s):
                await self._urgent.wait()
        except TimeoutError:
            return True
        return False

    def _due(self, *, everything: bool) -> list[Outbox]:
        self._urgent.clear()
        due = []
        num_slices = 0
        for outbox in self._waiting.values():
            if not (everything or self._policy.is_urgent(outbox)):
                continue
            num_slices += outbox.has_slice
            if not outbox.has_slice or num_slices <= MAX_SLICES:
                due.append(outbox)
        return due

    def _update(self) -> None:
        if not (self._waiting or self._restore_due):
            self._wake.clear()
        if not (self._waiting or self._lost):
            self._idle.set()
        limit = self._policy.max_unflushed_tokens
        if not self.has_capacity.is_set() and all(
            outbox.num_unsent < limit for outbox in self._waiting.values()
        ):
            self.has_capacity.set()

    def _settle(self, outbox: Outbox, item: Append, result: AppendResult, begin_s: float) -> None:
        if self._outboxes.get(outbox.job_id) is not outbox:
            return  # dropped, or taken up under another attempt, while the append was on its way
        match result.status:
            case AppendStatus.OK:
                outbox.accept()
                # The rest came while the append was in flight.
                outbox.sure_s = outbox.waiting_since_s = begin_s
                if outbox.over:
                    self._close(outbox, AppendStatus.OK)
                elif not outbox.has_something:
                    self._waiting.pop(outbox.job_id, None)
                elif item.prompt_slice is not None and outbox.job_id in self._waiting:
                    self._waiting[outbox.job_id] = self._waiting.pop(outbox.job_id)
            case AppendStatus.GAP:
                self._on_trouble()
                log_end = Cursor(result.num_tokens, result.num_bytes)
                if not outbox.rewind(log_end) or outbox.num_gaps > MAX_GAPS:
                    self._close(outbox, AppendStatus.DIVERGED)
            case AppendStatus.ENDED if item.end_of_job is not None:
                # This worker's own end, sent again because its first reply was lost, or another's.
                self._close(outbox, AppendStatus.ENDED)
            case AppendStatus.GONE:
                self._note_lost(outbox, result.detail)
            case AppendStatus.REJECTED:
                self._reject(outbox, item, result)
            case _:
                self._close(outbox, result.status, result.detail)

    def _reject(self, outbox: Outbox, item: Append, result: AppendResult) -> None:
        log.error(
            "the log rejected an append; the job fails",
            extra={
                **outbox.log_fields,
                "start": str(item.delta.start),
                "end": str(item.delta.end),
                "detail": result.detail,
            },
        )
        if item.end_of_job is not None and not item.delta.token_ids:
            self._close(outbox, AppendStatus.REJECTED, result.detail)
            return
        self._on_rejected(outbox.job_id, outbox.attempt)
        usage = item.end_of_job.usage if item.end_of_job else Usage(0, outbox.accepted.num_tokens)
        outbox.fail(
            JobEnd(
                state=JobState.FAILED,
                reason=ErrorCode.ENGINE_ERROR,
                usage=usage,
                message=f"the output could not be written: {result.detail}",
            )
        )

    def _close(self, outbox: Outbox, status: AppendStatus, detail: str = "") -> None:
        del self._outboxes[outbox.job_id]
        self._waiting.pop(outbox.job_id, None)
        self._lost.pop(outbox.job_id, None)
        if status not in (AppendStatus.OK, AppendStatus.ENDED):
            self._on_trouble()
        self._on_settled(Settled(outbox.job_id, outbox.attempt, status, detail))


class Publishers:
    """A Publisher for each partition, so that none waits for another."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._publishers = publishers
        self.has_capacity = AllSet([one.has_capacity for one in publishers])

    def _of(self, job_id: str) -> Publisher:
        return self._publishers[partition_of(job_id)]

    def open(self, outbox: Outbox) -> None:
        self._of(outbox.job_id).open(outbox)

    def notice(self, outbox: Outbox) -> None:
        self._of(outbox.job_id).notice(outbox)

    def drop(self, job_id: str) -> None:
        self._of(job_id).drop(job_id)

    def sure(self, job_ids: Iterable[str], since_s: float) -> None:
        for job_id in job_ids:
            self._of(job_id).sure((job_id,), since_s)

    def lost(self, job_id: str, attempt: int) -> None:
        self._of(job_id).lost(job_id, attempt)

    @property
    def num_unsent_total(self) -> int:
        return sum(one.num_unsent_total for one in self._publishers)

    @property
    def backlog_s(self) -> float:
        return max(one.backlog_s for one in self._publishers)

    async def flushed(self) -> None:
        """Waits until all output is sent."""
        await asyncio.gather(*(one.flushed() for one in self._publishers))

    async def run(self) -> None:
        """Runs until cancelled."""
        await asyncio.gather(*(one.run() for one in self._publishers))


class AllSet:
    """Several events as one."""

    def __init__(self, events: Sequence[asyncio.Event]) -> None:
        self._events = events

    def is_set(self) -> bool:
        return all(event.is_set() for event in self._events)

    async def wait(self) -> None:
        """Returns when all of them are set."""
        while not self.is_set():
            for event in self._events:
                await event.wait()
