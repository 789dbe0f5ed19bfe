"""JobStream: one reader's view of one job, completed from the log.

The log is the truth, the bus only wakes: whatever the bus loses, repeats or reorders is found again
in the log; repeated tokens are trimmed by cursor arithmetic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from api.generation.formatter import PromptScores
from api.jobs.reader_position import Diverged, ReaderPosition
from api.on_demand import load_part
from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    JobEvent,
    JobState,
    PromptSlice,
    Started,
    Usage,
)
from shared.tasks import cancel_and_wait
from shared.transport.ports.jobs import (
    EventBus,
    JobLook,
    JobStore,
    Restored,
    Resync,
    Subscription,
    TransportError,
)

log = logging.getLogger(__name__)

FIRST_PAGE_EVENTS = 32  # read first, while the size of the events is unknown
FEWEST_EVENTS = 4  # in a page: its first may repeat the last one of the page before
PAGE_EVENTS = 256  # read from the log at once: bounds what a slow reader holds
PAGE_NUMBERS = 16_384  # as far as the last page lets one guess: ids and log probabilities
NUMBER_BYTES = 8  # of a log probability or an id in a slice of the prompt
TURN_S = 0.004  # for which events are taken before other ready tasks get a turn
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0


class StreamInterrupted(Exception):
    """The store was away for too long. The job may be running; `cursor` is where to continue."""

    def __init__(self, job_id: str, cursor: Cursor) -> None:
        super().__init__(f"the log of {job_id} could not be read")
        self.job_id = job_id
        self.cursor = cursor


@dataclass(slots=True)
class RelayCounts:
    """Counts the repairs of a process's relays, for the metrics."""

    resyncs: int = 0
    gaps: int = 0
    overlaps: int = 0
    idle_reads: int = 0
    read_errors: int = 0


@dataclass(slots=True)
class Presence:
    """Whether the store has a stream's job, as far as its reader knows; by the loop's clock.

    `resubmit` of EventRelay.open. `patience_s`: how long a worker has to put a lost job back.
    """

    resubmit: Callable[[], Awaitable[Restored]] | None
    patience_s: float
    seen_s: float  # when the store had the job last
    missing_since_s: float | None = None  # since when it has no such job; None: wait anew
    is_over: bool = False  # by the last look: the job is gone, or has ended

    def look(self, found: JobLook | None, now_s: float) -> None:
        """Records what a look found."""
        if found is not None:
            self.seen(now_s)
        self.is_over = found is None or found.state in TERMINAL_STATES

    def seen(self, now_s: float) -> None:
        """Records that the store has the job."""
        self.seen_s, self.missing_since_s = now_s, None


class JobStream:
    """One reader's view. Not safe for several tasks; close it with `aclose`.

    Memory is bounded: one page of the log, and the bus's own bounded queue, which drops frames and
    gives a RESYNC when the reader is slow.
    """

    def __init__(
        self,
        job_id: str,
        after: Cursor,
        store: JobStore,
        bus: EventBus,
        subscription: Subscription,
        counts: RelayCounts,
        presence: Presence,
        outage_s: float,
        *,
        is_behind: bool,
        prompt: PromptScores | None,
    ) -> None:
        """Takes the parts that EventRelay.open makes. `is_behind`: the log may hold something
        already that no RESYNC will announce."""
        self.job_id = job_id
        self.ended = False
        self.has_started = False  # a worker reported it, or sent something
        self.started_s: float | None = None  # when a worker reported it, if that was received
        self._position = ReaderPosition(after)
        self._prompt = prompt
        self._num_slices = 0  # of the prompt, passed in the log
        self._store = store
        self._bus = bus
        self._subscription = subscription
        self._counts = counts
        self._outage_s = outage_s
        self._page: deque[Delta | JobEvent] = deque()
        self._page_events = FIRST_PAGE_EVENTS
        self._read_from: Cursor | None = None  # the end of a full page that had no news
        self._behind = is_behind
        self._reading: asyncio.Task[bool] | None = None
        self._clock = asyncio.get_running_loop().time
        self._is_closed = False
        self._is_interrupted = False
        self._is_doubtful = False  # the log may have been rolled back since it was compared
        self._presence = presence
        self.last_news_s = self._clock()  # when anything was received last
        self.recoveries: Any = None  # for a reader that asks: `get` returns None where it has one
        self._turn_began = self._clock()

    @property
    def cursor(self) -> Cursor:
        """Returns how far the reader has got."""
        return self._position.cursor

    @property
    def num_waiting(self) -> int:
        """Returns how many events are here and were not read: 0 for a reader that keeps up."""
        return len(self._page) + self._subscription.num_waiting

    @property
    def is_closed(self) -> bool:
        """Returns whether it has ended, or is read no longer."""
        return self._is_closed or self.ended

    @property
    def is_reading(self) -> bool:
        """Returns whether the log is being read, or will be by the next `get`."""
        return self._behind or self._reading is not None

    def compare(self, found: JobLook | None) -> None:
        """Reads the log if `found`, the job's cursor, differs from the delivered part; None: Redis
        has no such job."""
        if self.is_reading:
            return
        if self.recoveries is not None and self.recoveries.found(found, self.last_news_s):
            self._subscription.wake()
        self._presence.look(found, self._clock())
        is_over = self._presence.is_over
        if is_over or self._is_doubtful or found is None or found.end != self.cursor:
            self._counts.idle_reads += 1
            self._behind = True
            self._subscription.wake()

    def interrupt(self) -> None:
        """Ends the stream as interrupted: the store was away for too long."""
        self._is_interrupted = True
        self._subscription.wake()

    async def get(self, timeout_s: float) -> Delta | Finished | Failed | None:
        """Returns the next event, or None if none comes within `timeout_s`.

        Nothing follows a Finished or Failed. Raises StreamInterrupted.
        """
        assert not self.ended, "nothing follows the terminal event"
        deadline = self._clock() + timeout_s
        while True:
            if self.num_waiting and self._clock() - self._turn_began >= TURN_S:
                # A reader for which much waits would never await: others have a turn.
                await asyncio.sleep(0)
                self._turn_began = self._clock()
            while self._page:
                event = self._accept(self._page.popleft(), from_log=True)
                if event is not None:
                    return event
            if self._is_interrupted:
                raise StreamInterrupted(self.job_id, self.cursor)
            if self.recoveries:
                return None
            if self._behind:
                if not await self._catch_up(deadline):
                    return None
                continue
            event = await self._live(max(0.0, deadline - self._clock()))
            if event is not None:
                return event
            if not self._behind and self._clock() >= deadline:
                return None

    async def aclose(self) -> None:
        """Ends the subscription. Idempotent; cancels nothing."""
        self._is_closed = True
        if self._reading is not None:
            await cancel_and_wait(self._reading)
            if not self._reading.cancelled():
                self._reading.exception()  # retrieved: no `get` waits for this read
            self._reading = None
        await self._bus.unsubscribe(self._subscription)

    async def _live(self, timeout_s: float) -> Delta | Finished | Failed | None:
        is_here = self._subscription.num_waiting
        item = await self._subscription.get(timeout_s)
        now_s = self._clock()
        if not is_here:
            self._turn_began = now_s  # it was waited for
        if item is None:
            return None
        self.last_news_s = now_s
        if isinstance(item, Resync):
            self._counts.resyncs += 1
            self._behind = True
            self._presence.missing_since_s = None  # the worker may have to reconnect as well
            self._is_doubtful = True  # a failover may have rolled the log back
            return None
        self._presence.seen(now_s)
        return self._accept(item, from_log=False)

    def _accept(
        self, event: Delta | JobEvent, *, from_log: bool
    ) -> Delta | Finished | Failed | None:
        self.has_started = True
        if isinstance(event, Started):
            if self.started_s is None:
                self.started_s = time.monotonic()
            if self.recoveries is not None:
                self.recoveries.started(event, self.cursor.num_tokens, self._clock())
            return None
        if isinstance(event, PromptSlice):
            self._num_slices = max(self._num_slices, event.index + 1)
            if self._prompt is not None:
                self._prompt.take(event)
            return None
        if self._lacks_prompt(event):
            return self._without_prompt(from_log=from_log)
        if isinstance(event, Delta):
            return self._accept_delta(event, from_log=from_log)
        return self._accept_end(event, from_log=from_log)

    def _lacks_prompt(self, event: Delta | Finished | Failed) -> bool:
        is_whole = self._prompt is None or self._prompt.is_complete
        return not is_whole and not isinstance(event, Failed)

    def _without_prompt(self, *, from_log: bool) -> Failed | None:
        """Returns the replacement of an event that follows the prompt's log probabilities in
        the log: the channel never has them."""
        if not from_log:
            self._behind = True
            return None
        return self._failed(
            ErrorCode.JOB_LOST, "The job's log lacks a part that was computed of its prompt."
        )

    def _accept_delta(self, delta: Delta, *, from_log: bool) -> Delta | Failed | None:
        cursor = self.cursor
        try:
            if not self._position.is_gap(delta):
                fresh = self._position.take(delta)
                if fresh is not delta and not (from_log and fresh is None):
                    self._counts.overlaps += 1
                return fresh
        except Diverged as error:
            return self._diverged(str(error))
        if not from_log:
            self._counts.gaps += 1
            self._behind = True
            return None
        # The log is contiguous, unless the reader's cursor belongs to another history.
        return self._diverged(f"the log continues at {delta.start}, the reader is at {cursor}")

    def _accept_end(self, event: Finished | Failed, *, from_log: bool) -> Finished | Failed | None:
        end, cursor = event.end, self.cursor
        is_ahead = end.num_tokens > cursor.num_tokens or end.num_bytes > cursor.num_bytes
        if is_ahead and not from_log:
            self._behind = True  # the log has the missing tokens and this end
            return None
        self.ended = True
        self._page.clear()
        if isinstance(event, Finished) and end != cursor:
            return self._diverged(f"the log ends at {end}, the reader is at {cursor}")
        return event

    def _diverged(self, detail: str) -> Failed:
        log.error(
            "a stream no longer matches its job's log and was aborted",
            extra={"job_id": self.job_id, "detail": detail},
        )
        return self._failed(
            ErrorCode.STREAM_DIVERGED,
            "The job's log no longer matches the tokens already streamed: it was rolled back in an "
            "outage and written anew.",
        )

    def _failed(self, code: ErrorCode, message: str) -> Failed:
        self.ended = True
        self._page.clear()
        return Failed(
            end=self.cursor,
            state=JobState.FAILED,
            code=code,
            message=message,
            usage=Usage(0, self.cursor.num_tokens),
        )

    async def _catch_up(self, deadline: float) -> bool:
        """Reads a page of the log. Returns False at `deadline`; the read continues."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_page())
        # At least one turn of the loop, so that a reader that never waits still gets on.
        await asyncio.wait((self._reading,), timeout=max(0.001, deadline - self._clock()))
        if not self._reading.done():
            return False
        self._turn_began = self._clock()
        reading, self._reading = self._reading, None
        self._behind = reading.result()
        return True

    async def _read_page(self) -> bool:
        """Fills the page. Returns whether the log may hold more."""
        give_up = self._clock() + self._outage_s
        retry_s = FIRST_RETRY_S
        while True:
            try:
                events = await self._read_log()
                place = self._place(self.cursor)
                is_news = any(not self._has(event) for event in events)
                is_full = len(events) >= self._page_events
                lost = None if is_news or is_full else await self._missing_end(place)
                break
            except TransportError as error:
                self._counts.read_errors += 1
                self._presence.missing_since_s = None  # its worker has no server either
                if self._clock() + retry_s > give_up:
                    raise StreamInterrupted(self.job_id, self.cursor) from error
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        last = events[-1] if is_full and not is_news else None
        self._read_from = last.end if isinstance(last, Delta) else None
        self._page_events = next_page(events)
        self._page.extend(events)
        if is_news:
            self.last_news_s = self._clock()
        elif lost is not None:
            self._page.append(lost)
        # An entry that overlaps with the delivered part is compared with it as it is taken; without
        # one, the log is shorter than the reader, or nothing can be compared.
        if events or self._position.last_start == self.cursor:
            self._is_doubtful = False
        return is_full

    async def _read_log(self) -> Sequence[Delta | JobEvent]:
        """Returns a page of the log, from the start of the delta that the reader got last, or from
        where a page ended that the reader has all of.

        That one is only compared: a log that was rolled back and written anew up to the very
        cursor would overlap nowhere else, and another history would be spliced on.
        """
        since = self._place(self._read_from or self._position.last_start)
        cursor = self._place(self.cursor)
        events = await self._store.read_log(self.job_id, since, self._page_events)
        if not events and since != cursor:
            events = await self._store.read_log(self.job_id, cursor, self._page_events)
        return events

    async def _missing_end(self, place: Cursor) -> Finished | Failed | None:
        """Returns the end of a job that is over and whose log, read to `place`, does not have it;
        None while there may be another."""
        if not self._presence.is_over:
            return None
        end: Finished | Failed | None = await load_part("missing_end").missing_end(
            self.job_id, self._store, self._presence, self.cursor, place
        )
        self._presence.is_over = False
        return end

    def _has(self, event: Delta | JobEvent) -> bool:
        if isinstance(event, PromptSlice):
            return event.index < self._num_slices
        return isinstance(event, Delta) and self._position.has(event)

    def _place(self, cursor: Cursor) -> Cursor:
        """Returns the offset in the log of a reader at `cursor`: the prompt's slices precede the
        text."""
        return Cursor(0, self._num_slices) if cursor == START else cursor


def next_page(events: Sequence[Delta | JobEvent]) -> int:
    """Returns how many events to read after these: an entry may hold one token or hundreds of them,
    each with twenty alternatives."""
    numbers = 1
    for event in events:
        if isinstance(event, Delta):
            width = 1 if not event.logprobs else 2 + len(event.logprobs[0].top)
            numbers += len(event.token_ids) * width
        elif isinstance(event, PromptSlice):
            numbers += len(event.entries) // NUMBER_BYTES
    fitting = len(events) * PAGE_NUMBERS // numbers
    return min(max(FEWEST_EVENTS, fitting), PAGE_EVENTS) if events else FIRST_PAGE_EVENTS
