"""Quiet streams are looked at seldom, many at a time, and what they missed is seen in time.

Time is the loop's own and passes only while nothing can run: intervals are exact on any machine.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from api.jobs.relay import EARLY, MAX_SILENCES, PAGE_STREAMS, TURNS_PER_SILENCE, QuietStreams
from shared.messages import START, JobState
from shared.transport.ports.jobs import JobLook, TransportError

SILENCE_S = 1.0
OUTAGE_S = 30.0
TURN_S = SILENCE_S / TURNS_PER_SILENCE
WORST_S = MAX_SILENCES * SILENCE_S + TURN_S  # from a loss to the look that sees it
A_LITTLE_S = 1e-3


class LeapingSelector(selectors.DefaultSelector):
    """Instead of waiting it moves the clock on."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now_s


def leap(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


class FakeStream:
    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.is_closed = False
        self.is_reading = False
        self.is_interrupted = False
        self.recoveries: object | None = None
        self.last_news_s = now()
        self.looks_s: list[float] = []

    def compare(self, found: JobLook | None) -> None:
        self.looks_s.append(now())

    def interrupt(self) -> None:
        self.is_interrupted = self.is_closed = True


class FakeStore:
    def __init__(self) -> None:
        self.is_away = False
        self.state = JobState.QUEUED
        self.calls: list[tuple[float, int]] = []  # when, and of how many jobs

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        self.calls.append((now(), len(job_ids)))
        if self.is_away:
            raise TransportError("away")
        return [JobLook(self.state, START)] * len(job_ids)


def quiet_over(store: FakeStore) -> QuietStreams:
    return QuietStreams(store, silence_s=SILENCE_S, outage_s=OUTAGE_S)  # type: ignore[arg-type]


def gaps(times: Sequence[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def test_a_stream_is_looked_at_after_a_silence_and_then_at_growing_intervals() -> None:
    async def main() -> None:
        quiet, stream = quiet_over(FakeStore()), FakeStream("0-x")
        quiet.add(stream)
        await asyncio.sleep(120)
        assert SILENCE_S <= stream.looks_s[0] - stream.last_news_s <= SILENCE_S + TURN_S
        for gap, silences in zip(gaps(stream.looks_s), (2, 4, *[MAX_SILENCES] * 100), strict=False):
            least_s = (1 - EARLY) * silences * SILENCE_S
            assert least_s - A_LITTLE_S <= gap <= silences * SILENCE_S + TURN_S + A_LITTLE_S
        assert max(gaps(stream.looks_s)) <= WORST_S + A_LITTLE_S
        assert len(stream.looks_s) > 120 / WORST_S - 1
        await quiet.aclose()

    leap(main)


def test_an_event_restarts_the_silence_timer() -> None:
    async def main() -> None:
        quiet, stream = quiet_over(FakeStore()), FakeStream("0-x")
        quiet.add(stream)
        await asyncio.sleep(60)
        stream.last_news_s = heard_s = now()
        await asyncio.sleep(WORST_S + SILENCE_S)
        after = [look_s for look_s in stream.looks_s if look_s > heard_s]
        assert heard_s + SILENCE_S <= after[0] <= heard_s + WORST_S + A_LITTLE_S
        # From here on it hears something all the time.
        num_looks = len(stream.looks_s)
        for _ in range(100):
            stream.last_news_s = now()
            await asyncio.sleep(SILENCE_S / 2)
        assert len(stream.looks_s) <= num_looks + 1
        await quiet.aclose()

    leap(main)


@pytest.mark.promise("HTTP: idle does not spin, nor do waiting streams")
def test_many_streams_share_calls_of_a_bounded_page_that_are_spread_over_time() -> None:
    async def main() -> None:
        count, store = 1500, FakeStore()
        quiet = quiet_over(store)
        for number in range(count):  # all at the same moment
            quiet.add(FakeStream(f"0-{number}"))
        await asyncio.sleep(300)
        begin_s = now()
        await asyncio.sleep(100)
        calls = [(when_s, jobs) for when_s, jobs in store.calls if when_s > begin_s]
        assert max(jobs for _, jobs in store.calls) == PAGE_STREAMS
        looks = sum(jobs for _, jobs in calls)
        assert count * 100 / WORST_S <= looks <= count * 100 / ((1 - EARLY) * WORST_S) * 1.1
        assert len(calls) <= 100 / TURN_S + looks / PAGE_STREAMS
        a_turn = {int(when_s / TURN_S): 0 for when_s, _ in calls}
        for when_s, jobs in calls:
            a_turn[int(when_s / TURN_S)] += jobs
        assert max(a_turn.values()) < count / 4, "they come together, and do not stay so"
        await quiet.aclose()

    leap(main)


def test_while_the_store_is_away_one_call_is_tried_and_after_the_outage_all_are_interrupted() -> (
    None
):
    async def main() -> None:
        store = FakeStore()
        quiet, streams = quiet_over(store), [FakeStream(f"0-{number}") for number in range(600)]
        for stream in streams:
            quiet.add(stream)
        await asyncio.sleep(10)
        store.is_away, away_s = True, now()
        store.calls.clear()
        await asyncio.sleep(OUTAGE_S - SILENCE_S)
        assert not any(stream.is_interrupted for stream in streams)
        assert len(store.calls) <= OUTAGE_S / SILENCE_S
        await asyncio.sleep(SILENCE_S + 2 * WORST_S)
        assert all(stream.is_interrupted for stream in streams)
        assert now() < away_s + OUTAGE_S + 3 * WORST_S
        await quiet.aclose()

    leap(main)


def test_after_a_short_outage_every_stream_is_looked_at_in_time() -> None:
    async def main() -> None:
        store = FakeStore()
        quiet, streams = quiet_over(store), [FakeStream(f"0-{number}") for number in range(600)]
        for stream in streams:
            quiet.add(stream)
        store.is_away = True
        await asyncio.sleep(OUTAGE_S / 2)
        store.is_away, back_s = False, now()
        await asyncio.sleep(WORST_S + SILENCE_S)
        assert all(stream.looks_s[-1] > back_s for stream in streams)
        assert not any(stream.is_interrupted for stream in streams)
        await quiet.aclose()

    leap(main)


@pytest.mark.parametrize("others", ["closed", "busy"])
def test_a_short_outage_that_no_look_saw_the_end_of_is_not_counted_on(others: str) -> None:
    async def main() -> None:
        store = FakeStore()
        quiet, stream = quiet_over(store), FakeStream("0-x")
        quiet.add(stream)
        store.is_away = True
        await asyncio.sleep(SILENCE_S + 2 * TURN_S)
        assert store.calls, "one look failed"
        store.is_away = False
        if others == "closed":  # it went on by itself, and ended before the next look
            stream.is_closed = True
            await asyncio.sleep(2 * OUTAGE_S)
        else:
            for _ in range(round(4 * OUTAGE_S / SILENCE_S)):
                stream.last_news_s = now()
                await asyncio.sleep(SILENCE_S / 2)
        store.is_away, later = True, FakeStream("0-y")
        quiet.add(later)
        await asyncio.sleep(OUTAGE_S / 2)
        assert len(store.calls) > 2
        assert not later.is_interrupted
        await asyncio.sleep(OUTAGE_S)
        assert later.is_interrupted
        await quiet.aclose()

    leap(main)


@pytest.mark.parametrize("is_reading", [True, False])
def test_nothing_is_left_of_streams_that_were_closed(is_reading: bool) -> None:
    async def main() -> None:
        store = FakeStore()
        quiet, stream = quiet_over(store), FakeStream("0-x")
        stream.is_reading = is_reading  # by itself: it needs no look
        quiet.add(stream)
        await asyncio.sleep(20)
        assert bool(stream.looks_s) is not is_reading
        stream.is_closed = True
        await asyncio.sleep(WORST_S + SILENCE_S)
        assert quiet._task is not None
        assert quiet._task.done()
        quiet.add(FakeStream("0-y"))
        await asyncio.sleep(SILENCE_S + TURN_S)
        assert store.calls[-1][1] == 1
        await quiet.aclose()
        await quiet.aclose()

    leap(main)


def test_a_reader_that_asked_for_recoveries_is_looked_at_often_while_its_job_runs() -> None:
    async def main() -> None:
        store = FakeStore()
        quiet, asks, other = quiet_over(store), FakeStream("0-a"), FakeStream("0-b")
        asks.recoveries = object()
        quiet.add(asks)
        quiet.add(other)
        await asyncio.sleep(60)
        assert max(gaps(asks.looks_s)) > 2 * SILENCE_S, "while it is queued"
        store.state = JobState.RUNNING
        await asyncio.sleep(60)
        before = len(asks.looks_s)
        await asyncio.sleep(60)
        assert max(gaps(asks.looks_s[before:])) <= SILENCE_S + TURN_S + A_LITTLE_S
        assert max(gaps(other.looks_s)) > 2 * SILENCE_S

    leap(main)
