"""QuietStreams and MissingEnd: find what the bus and the store have lost.

QuietStreams looks at the jobs of streams that receive nothing; MissingEnd ends a stream whose log
has no end.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    JobState,
    Usage,
)
from shared.outages import OF_STORE_OUTAGE
from shared.tasks import cancel_and_wait
from shared.transport.ports.jobs import (
    MAX_BLIND_S,
    JobLook,
    JobRecord,
    JobStore,
    Restored,
    TransportError,
)

log = logging.getLogger(__name__)

PAGE_STREAMS = 256  # looked at in one call
MAX_SILENCES = 5  # the longest interval between two checks, in units of `silence_s`
TURNS_PER_SILENCE = 4  # rounds of checks in each `silence_s`
EARLY = 0.2  # jitter: checks come up to this part of an interval early


class WatchedStream(Protocol):
    """A stream of one job: see `api.jobs.event_stream.JobStream`."""

    job_id: str
    last_news_s: float  # when anything was received last

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_reading(self) -> bool: ...

    def compare(self, found: JobLook | None) -> None: ...
    def interrupt(self) -> None: ...


@dataclass(slots=True)
class _Watch:
    stream: WatchedStream
    news_s: float  # the stream's last news when it was looked at last
    interval_s: float


class QuietStreams:
    """Looks at the jobs of streams that received nothing for `silence_s`, then after intervals that
    double up to MAX_SILENCES times `silence_s`, until they receive something.

    What the bus loses shows in no other way: a stream that receives nothing cannot know whether
    there was anything. One call of the store looks at many jobs, so that streams that wait cost
    next to nothing. While the store is away a single look is tried each `silence_s`; after
    `outage_s` the streams whose look is due are interrupted.
    """

    def __init__(self, store: JobStore, *, silence_s: float, outage_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._outage_s = outage_s
        self._due: list[tuple[float, int, _Watch]] = []  # a heap by time
        self._order = itertools.count()
        self._away_since_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: WatchedStream) -> None:
        """Watches a stream until it is closed."""
        watch = _Watch(stream, stream.last_news_s, self._silence_s)
        self._push(watch, stream.last_news_s + self._silence_s)
        if self._task is None or self._task.done():
            # Empty context: the task outlives the request that starts it.
            context = contextvars.Context()
            self._task = asyncio.create_task(self._run(), name="quiet-streams", context=context)

    async def aclose(self) -> None:
        """Stops. Idempotent."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None

    def _push(self, watch: _Watch, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), watch))

    async def _run(self) -> None:
        """Checks due streams until none is left."""
        while self._due:
            page = self._take_due()
            if not page:
                self._away_since_s = None  # nothing is tried: nothing is known of the store
            if page and not await self._look(page):
                await asyncio.sleep(self._silence_s)
            elif len(page) < PAGE_STREAMS:
                await asyncio.sleep(self._silence_s / TURNS_PER_SILENCE)
        self._away_since_s = None

    def _take_due(self) -> list[_Watch]:
        """Returns at most a page of the streams that are quiet and due; puts the others off."""
        now, page = asyncio.get_running_loop().time(), list[_Watch]()
        while self._due and self._due[0][0] <= now and len(page) < PAGE_STREAMS:
            _, _, watch = heapq.heappop(self._due)
            stream = watch.stream
            if stream.is_closed:
                continue
            if stream.last_news_s != watch.news_s:
                watch.news_s, watch.interval_s = stream.last_news_s, self._silence_s
            if stream.is_reading:
                self._push(watch, now + self._silence_s)
            elif now < watch.news_s + self._silence_s:
                self._push(watch, watch.news_s + self._silence_s)
            else:
                page.append(watch)
        return page

    async def _look(self, page: list[_Watch]) -> bool:
        """Looks at a page. Returns False when that failed: the page is due again."""
        try:
            looks = await self._store.look([watch.stream.job_id for watch in page])
        except TransportError as error:
            self._failed(page, str(error))
            return False
        except Exception:
            log.exception("failed to check quiet streams")
            self._failed(page, "an internal error")
            return False
        self._away_since_s = None
        now = asyncio.get_running_loop().time()
        for watch in page:
            watch.interval_s = min(2 * watch.interval_s, MAX_SILENCES * self._silence_s)
            self._push(watch, now + watch.interval_s * random.uniform(1 - EARLY, 1))
        for watch, found in zip(page, looks, strict=True):
            if watch.stream.last_news_s == watch.news_s and not watch.stream.is_closed:
                watch.stream.compare(found)
        return True

    def _failed(self, page: list[_Watch], reason: str) -> None:
        """Puts the page back, or interrupts all that are due when the store was away too long."""
        now = asyncio.get_running_loop().time()
        if self._away_since_s is None:
            self._away_since_s = now
            extra = {"reason": reason, **OF_STORE_OUTAGE}
            log.warning("quiet streams cannot be checked while Redis is unavailable", extra=extra)
        if now < self._away_since_s + self._outage_s:
            for watch in page:
                self._push(watch, now)
            return
        while page:
            for watch in page:
                watch.stream.interrupt()
            page = self._take_due()


class MissingEnd:
    """Finds it for one reader: the job's record is gone, or outlived the log.

    The store may have lost the job in an outage. Its worker may put it back for a while; a job of
    which the reader has nothing yet is submitted again.
    """

    def __init__(
        self,
        job_id: str,
        store: JobStore,
        resubmit: Callable[[], Awaitable[Restored]] | None,
        patience_s: float,
    ) -> None:
        """Takes `resubmit` of EventRelay.open. `patience_s`: how long a worker has to put a lost
        job back."""
        self._job_id = job_id
        self._store = store
        self._resubmit = resubmit
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._missing_since_s: float | None = None  # since when the store has no such job
        self._seen_s = self._clock()  # when the store had the job last
        self._is_over = False  # by the store: the job is gone, or has ended

    def look(self, found: JobLook | None) -> bool:
        """Returns whether the job is missing or has ended, by the store's record."""
        if found is not None:
            self.seen()
        self._is_over = found is None or found.state in TERMINAL_STATES
        return self._is_over

    def seen(self) -> None:
        """Records that the store has the job."""
        self._missing_since_s, self._seen_s = None, self._clock()

    def restart_patience(self) -> None:
        """Restarts the wait for a worker, which could not reach the store either."""
        self._missing_since_s = None

    async def end(self, cursor: Cursor, place: Cursor) -> Finished | Failed | None:
        """Returns the end of a job that is over for a reader at `cursor`, None while there may be
        another. `place`: where that is in the log.

        After a TransportError it is called again.
        """
        if not self._is_over:
            return None
        record = await self._store.get(self._job_id)
        if record is None:
            end: Finished | Failed | None = await self._end_of_lost(cursor)
        else:
            end = await self._end_of_known(record, cursor, place)
        self._is_over = False
        return end

    async def _end_of_lost(self, cursor: Cursor) -> Failed | None:
        resubmitted = await self._submitted_again(cursor)
        if resubmitted is Restored.RESTORED:
            return None
        if resubmitted is None and not self._has_been_missing():
            return None  # its worker may put it back until a later look
        return Failed(
            end=cursor,
            state=JobState.FAILED,
            code=ErrorCode.JOB_LOST,
            message="The job is no longer known: its record expired or was lost.",
            usage=Usage(0, cursor.num_tokens),
        )

    def _has_been_missing(self) -> bool:
        """Returns whether it has been missing for longer than a worker takes to put it back."""
        now_s = self._clock()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return now_s - self._missing_since_s >= self._patience_s

    async def _end_of_known(
        self, record: JobRecord, cursor: Cursor, place: Cursor
    ) -> Finished | Failed | None:
        self.seen()
        if record.state not in TERMINAL_STATES:
            return None
        if await self._store.read_log(self._job_id, place, 1):
            return None  # it ended between the two looks; the next read has all
        return _end_of_record(record, cursor)

    async def _submitted_again(self, cursor: Cursor) -> Restored | None:
        """Submits a job again that the store lost before its reader got anything.

        Returns None where this reader cannot, or has not seen the job for so long that it may have
        ended.
        """
        if self._resubmit is None or cursor != START:
            return None
        if self._clock() - self._seen_s > MAX_BLIND_S:
            return None
        restored = await self._resubmit()
        if restored is Restored.RESTORED:
            self.seen()
            log.warning(
                "resubmitted a job that Redis had lost, for its reader",
                extra={"job_id": self._job_id},
            )
        return restored


def _end_of_record(record: JobRecord, cursor: Cursor) -> Finished | Failed:
    usage = Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
    if record.state is JobState.FINISHED and record.completion_tokens == cursor.num_tokens:
        reason = FinishReason(record.reason or FinishReason.STOP)
        return Finished(cursor, reason, usage, record.stop_reason, record.ended_ms)
    if record.state is JobState.FINISHED:
        return Failed(
            end=cursor,
            state=JobState.FAILED,
            code=ErrorCode.JOB_LOST,
            message="The job has finished, but its log does not reach this point: it cannot be "
            "resumed from here.",
            usage=usage,
        )
    return Failed(
        end=cursor,
        state=record.state,
        code=record.reason or record.state.value,
        message=record.message or "",
        usage=usage,
    )
