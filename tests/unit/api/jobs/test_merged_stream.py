"""Several jobs read as one: choices numbered through, one end."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from api.jobs.event_stream import StreamInterrupted
from api.jobs.merged_stream import MergedStream
from api.jobs.relay import EventRelay
from shared.choice_deltas import ChoiceDelta, choice_deltas
from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    JobState,
    Segment,
    Usage,
)
from tests.unit.api.jobs.relay_fakes import FakeBus, FakeStore, finished_after, log_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def merged(*stores: FakeStore, num_choices: int = 1, outage_s: float = 5.0) -> MergedStream:
    streams = []
    for index, store in enumerate(stores):
        relay = EventRelay(store, FakeBus(), silence_s=0.01, outage_s=outage_s)  # type: ignore[arg-type]
        streams.append(await relay.open(f"0-{index}", START))
    return MergedStream(streams, num_choices)


async def read(stream: MergedStream) -> tuple[dict[int, list[ChoiceDelta]], Finished | Failed]:
    parts: dict[int, list[ChoiceDelta]] = {}
    async with asyncio.timeout(20):
        while True:
            event = await stream.get(0.1)
            if isinstance(event, Delta):
                for part in choice_deltas(event):
                    parts.setdefault(part.choice, []).append(part)
            elif event is not None:
                await stream.aclose()
                return parts, event


def texts(parts: dict[int, list[ChoiceDelta]]) -> dict[int, str]:
    return {choice: "".join(part.text for part in own) for choice, own in sorted(parts.items())}


def ends(parts: dict[int, list[ChoiceDelta]]) -> dict[int, list[object]]:
    """Finish and stop reasons, which come with a choice's last part only."""
    for own in parts.values():
        assert all(part.finish_reason is None for part in own[:-1])
    return {choice: [own[-1][4], own[-1][5]] for choice, own in sorted(parts.items())}


async def test_jobs_of_one_choice_become_choices_with_their_own_ends() -> None:
    first, second = log_of(["ab", "c"]), log_of(["x", "é"])
    cut = dataclasses.replace(finished_after(second), reason=LENGTH)
    stopped = dataclasses.replace(finished_after(first), stop_reason="END")
    stream = await merged(FakeStore([*first, stopped]), FakeStore([*second, cut]))
    parts, end = await read(stream)
    assert texts(parts) == {0: "abc", 1: "xé"}
    assert ends(parts) == {0: [STOP, "END"], 1: [LENGTH, None]}
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_reason) == (LENGTH, None)
    assert end.usage == Usage(6, 5)
    assert stream.has_ended(0)
    assert stream.has_ended(1)


async def test_choices_of_several_jobs_are_numbered_through() -> None:
    def job(words: str) -> list[Delta | Finished]:
        segments = (Segment(1, 1, 1, STOP, words[1]), Segment(0, 1, 1, LENGTH))
        delta = Delta(START, Cursor(2, 2), (7, 8), words[1] + words[0], None, segments)
        return [delta, Finished(delta.end, LENGTH, Usage(3, 2, 1))]

    stream = await merged(*(FakeStore(job(words)) for words in ("ab", "cd", "ef")), num_choices=2)
    parts, end = await read(stream)
    assert texts(parts) == dict(enumerate("abcdef"))
    assert ends(parts) == {
        index: [STOP, "abcdef"[index]] if index % 2 else [LENGTH, None] for index in range(6)
    }
    assert end.usage == Usage(9, 6, 3)


async def test_the_first_job_that_fails_is_the_end() -> None:
    failure = Failed(START, JobState.FAILED, "engine_error", "no", Usage(3, 0))
    endless = FakeStore(log_of(["a"]))
    stream = await merged(endless, FakeStore([failure]), endless)
    _, end = await read(stream)
    assert end == failure
    assert [stream.has_ended(index) for index in range(3)] == [False, True, False]


async def test_what_one_stream_raises_is_raised() -> None:
    broken = FakeStore()
    broken.failures = 10**6
    stream = await merged(FakeStore(log_of(["a"])), broken, outage_s=0.05)
    with pytest.raises(StreamInterrupted) as caught:
        await read(stream)
    assert caught.value.job_id == "0-1"
    await stream.aclose()


async def test_a_timeout_returns_none_and_a_slow_reader_misses_no_event() -> None:
    log = log_of(["a"] * 50)
    store = FakeStore([*log, finished_after(log)])
    store.visible = 0
    stream = await merged(store, store)
    assert await stream.get(0.01) is None
    store.visible = len(store.log)
    await asyncio.sleep(0.05)
    parts, _ = await read(stream)
    assert texts(parts) == {0: "a" * 50, 1: "a" * 50}
