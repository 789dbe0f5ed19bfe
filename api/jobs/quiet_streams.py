"""QuietStreams: looks at the jobs of all streams that have heard nothing for a while.

What the bus loses shows in no other way: a stream that hears nothing cannot know whether there was
nothing to hear. One call of the store looks at many jobs, so that streams that wait cost next to
nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from dataclasses import dataclass
from typing import Protocol

from shared.tasks import cancel_and_wait
from shared.transport.ports.jobs import JobLook, JobStore, TransportError

log = logging.getLogger(__name__)

PAGE_STREAMS = 256  # looked at in one call
MAX_SILENCES = 5  # a look follows the one before after so many first silences at the latest
TURNS_PER_SILENCE = 4  # how finely due looks are gathered
EARLY = 0.2  # up to this part of an interval, so that streams that came together spread


class Watched(Protocol):
    """A stream, as it is looked after."""

    @property
    def job_id(self) -> str: ...
    @property
    def is_closed(self) -> bool:
        """It has no reader any more, or it has ended."""
        ...

    @property
    def is_reading(self) -> bool:
        """It reads the log by itself at the moment."""
        ...

    @property
    def last_news_s(self) -> float:
        """When it heard something last, by the loop's clock."""
        ...

    def compare(self, found: JobLook | None) -> None:
        """Reads the log if `found` is not what the stream has; None: the job is gone."""
        ...

    def interrupt(self) -> None:
        """The store was away for too long."""
        ...


@dataclass(slots=True)
class _Watch:
    stream: Watched
    news_s: float  # the stream's last news when it was looked at last
    interval_s: float


class QuietStreams:
    """A stream that hears nothing for `silence_s` is looked at, and then again and again: after
    intervals that double up to MAX_SILENCES times `silence_s`, until it hears something.

    While the store is away a single look is tried each `silence_s`; after `outage_s` the streams
    whose look is due are interrupted.
    """

    def __init__(self, store: JobStore, *, silence_s: float, outage_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._outage_s = outage_s
        self._due: list[tuple[float, int, _Watch]] = []  # a heap by time
        self._order = itertools.count()
        self._away_since_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: Watched) -> None:
        """Looks after the stream until it is closed."""
        watch = _Watch(stream, stream.last_news_s, self._silence_s)
        self._push(watch, stream.last_news_s + self._silence_s)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="quiet-streams")

    async def aclose(self) -> None:
        """Idempotent."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None

    def _push(self, watch: _Watch, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), watch))

    async def _run(self) -> None:
        """Until no stream is left."""
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
        """At most a page of the streams that are quiet and due. The others are put off."""
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
        """False when it failed: the page is due again."""
        try:
            looks = await self._store.look([watch.stream.job_id for watch in page])
        except TransportError as error:
            self._failed(page, str(error))
            return False
        except Exception:
            log.exception("look failed")
            self._failed(page, "a fault of this process")
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
            log.warning("quiet streams cannot be looked at", extra={"reason": reason})
        if now < self._away_since_s + self._outage_s:
            for watch in page:
                self._push(watch, now)
            return
        while page:
            for watch in page:
                watch.stream.interrupt()
            page = self._take_due()
