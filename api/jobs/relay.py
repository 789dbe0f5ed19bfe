"""EventRelay: one job's events for one reader, in order, once each, then exactly one end.

Order of opening: subscribe, wait for the confirmation, submit; so no event of the job can precede
its reader. The subscription may begin before (`expecting`), while the job is being made.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from api.generation.formatter import PromptScores
from api.jobs.event_stream import JobStream, Presence, RelayCounts
from shared.messages import Cursor, JobState
from shared.outages import OF_STORE_OUTAGE
from shared.tasks import cancel_and_wait
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

PAGE_STREAMS = 256  # looked at in one call
MAX_SILENCES = 5  # the longest interval between two checks, in units of `silence_s`
TURNS_PER_SILENCE = 4  # rounds of checks in each `silence_s`
EARLY = 0.2  # jitter: checks come up to this part of an interval early


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
        self._quiet = defaultdict[int, QuietStreams](  # by partition: one may be away alone
            partial(QuietStreams, store, silence_s=silence_s, outage_s=outage_s)
        )
        self._expected: dict[str, list[Subscription]] = {}  # by job id; not confirmed yet
        self.counts = RelayCounts()

    async def aclose(self) -> None:
        """Stops looking after streams that are still open. Idempotent."""
        for quiet in self._quiet.values():
            await quiet.aclose()

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
            Presence(resubmit, self._patience_s, asyncio.get_running_loop().time()),
            self._outage_s,
            is_behind=must_catch_up,
            prompt=prompt,
        )
        self._quiet[self._store.partition_of(job_id)].add(stream)
        return stream


@dataclass(slots=True)
class _Watch:
    stream: JobStream
    news_s: float  # the stream's last news when it was looked at last
    interval_s: float


class QuietStreams:
    """Looks at the jobs of streams that received nothing for `silence_s`, then after intervals that
    double up to MAX_SILENCES times `silence_s` until they have something. A reader that asked for
    recoveries is not made to wait longer while its job runs.

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

    def add(self, stream: JobStream) -> None:
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
        for watch, found in zip(page, looks, strict=True):
            is_running = found is not None and found.state is JobState.RUNNING
            asks = is_running and watch.stream.recoveries is not None
            silences = 1 if asks else MAX_SILENCES
            watch.interval_s = min(2 * watch.interval_s, silences * self._silence_s)
            self._push(watch, now + watch.interval_s * random.uniform(1 - EARLY, 1))
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
