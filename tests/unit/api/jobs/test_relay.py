"""The relay gives a job's events in order, once each, then exactly one end."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.jobs.event_stream import PAGE_EVENTS, JobStream, StreamInterrupted
from api.jobs.relay import EventRelay
from shared.messages import (
    START,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    JobState,
    Started,
    Usage,
)
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.jobs import RESYNC, Restored, Submitted, TransportError
from tests.support.examples import examples
from tests.unit.api.jobs.relay_fakes import (
    FakeBus,
    FakeStore,
    finished_after,
    log_of,
    merged,
    record_of,
)

SILENCE_S = 0.02


def relay_over(store: FakeStore, bus: FakeBus, outage_s: float = 5.0) -> EventRelay:
    return EventRelay(store, bus, silence_s=SILENCE_S, outage_s=outage_s)  # type: ignore[arg-type]


async def open_stream(store: FakeStore, bus: FakeBus, after: Cursor = START) -> JobStream:
    return await relay_over(store, bus).open("0-x", after)


async def read_to_end(stream: JobStream) -> tuple[list[Delta], Finished | Failed]:
    deltas = []
    deadline = time.monotonic() + 20
    while True:
        assert time.monotonic() < deadline, "the stream does not end"
        event = await stream.get(0.05)
        if isinstance(event, Delta):
            deltas.append(event)
        elif event is not None:
            return deltas, event


def assert_contiguous(deltas: list[Delta], after: Cursor = START) -> None:
    cursor = after
    for delta in deltas:
        assert delta.start == cursor
        assert len(delta.token_ids) == delta.end.num_tokens - delta.start.num_tokens
        assert len(delta.text.encode()) == delta.end.num_bytes - delta.start.num_bytes
        cursor = delta.end


async def test_subscribes_before_it_submits_and_unsubscribes_when_submit_fails() -> None:
    bus = FakeBus()

    async def submit() -> None:
        bus.steps.append("submit")
        raise QueueFull("total", 1.0)

    with pytest.raises(QueueFull):
        await relay_over(FakeStore(), bus).open("0-x", START, submit)
    assert bus.steps == ["subscribe", "submit", "unsubscribe"]


async def accepted() -> Submitted:
    return Submitted.ACCEPTED


async def test_an_expected_stream_is_confirmed_before_the_submit() -> None:
    bus = FakeBus()
    relay = relay_over(FakeStore(), bus)

    async def submit() -> None:
        bus.steps.append("submit")
        raise QueueFull("total", 1.0)

    async with relay.expecting("0-x"):
        with pytest.raises(QueueFull):
            await relay.open("0-x", START, submit)
    assert bus.steps == ["begin", "confirmed", "submit", "unsubscribe"]


async def test_what_was_expected_and_not_opened_is_unsubscribed_from() -> None:
    """A reader of the job that submits nothing subscribes by itself; so does another job's."""
    bus = FakeBus()
    relay = relay_over(FakeStore(), bus)
    async with relay.expecting("0-x"):
        await (await relay.open("0-x", START)).aclose()
        assert bus.steps == ["begin", "subscribe", "unsubscribe"]
        async with relay.expecting("0-x"):
            pass
    assert bus.steps[3:] == ["begin", "unsubscribe", "unsubscribe"]
    bus.steps.clear()
    await (await relay.open("0-x", START, accepted)).aclose()
    assert bus.steps == ["subscribe", "unsubscribe"]


async def test_of_a_new_job_the_log_is_read_only_when_something_may_be_missing() -> None:
    bus, store, deltas = FakeBus(), FakeStore(), log_of(["a", "bc"])
    events = [*deltas, finished_after(deltas)]

    async def submit() -> Submitted:
        bus.subscription.items.extend(events)
        return Submitted.ACCEPTED

    got, end = await read_to_end(await relay_over(store, bus).open("0-x", START, submit))
    assert (got, end, store.reads) == (deltas, finished_after(deltas), 0)

    async def confirmed_again() -> Submitted:
        bus.subscription.items.extend([RESYNC, *events])
        return Submitted.ACCEPTED

    bus, store = FakeBus(), FakeStore(events)
    got, end = await read_to_end(await relay_over(store, bus).open("0-x", START, confirmed_again))
    assert (got, end) == (deltas, finished_after(deltas))
    assert store.reads > 0


async def test_of_a_job_that_was_there_before_the_log_is_read() -> None:
    deltas = log_of(["a", "bc"])
    bus, store = FakeBus(), FakeStore([*deltas, finished_after(deltas)])

    async def duplicate() -> Submitted:
        return Submitted.DUPLICATE

    got, end = await read_to_end(await relay_over(store, bus).open("0-x", START, duplicate))
    assert (got, end) == (deltas, finished_after(deltas))
    assert store.reads > 0


async def test_live_frames_come_without_reading_the_log_again() -> None:
    bus, store = FakeBus(), FakeStore()
    deltas = log_of(["a", "bc", "d"])
    bus.subscription.items.extend([Started("w", 1), *deltas, finished_after(deltas)])
    got, end = await read_to_end(await open_stream(store, bus))
    assert got == deltas
    assert end == finished_after(deltas)
    assert store.reads == 1  # the one that the confirmation asks for


async def test_a_lost_last_frame_is_found_in_the_log_after_silence() -> None:
    deltas = log_of(["a", "b"])
    store, bus = FakeStore([*deltas, finished_after(deltas)]), FakeBus()
    store.visible = 1
    stream = await open_stream(store, bus)
    assert await stream.get(1) == deltas[0]
    store.visible = 3
    got, end = await read_to_end(stream)
    assert (got, end) == ([deltas[1]], finished_after(deltas))


async def test_an_end_that_overtakes_its_tokens_waits_for_them() -> None:
    deltas = log_of(["a", "b", "c"])
    store, bus = FakeStore([*deltas, finished_after(deltas)]), FakeBus()
    store.visible = 0
    stream = await open_stream(store, bus)
    assert await stream.get(0.001) is None
    store.visible = 4
    bus.subscription.items.append(finished_after(deltas))
    got, end = await read_to_end(stream)
    assert (got, end) == (deltas, finished_after(deltas))


async def test_resuming_inside_a_frame_gives_the_rest_of_it() -> None:
    deltas = log_of(["héllo", "wörld"])
    store, bus = FakeStore([*deltas, finished_after(deltas)]), FakeBus()
    got, _ = await read_to_end(await open_stream(store, bus, Cursor(2, 3)))
    assert "".join(delta.text for delta in got) == "llowörld"
    assert_contiguous(got, Cursor(2, 3))
    assert got[0].token_ids == (2, 3, 4)


async def test_text_that_grows_without_tokens_is_delivered() -> None:
    first = log_of(["ab"])[0]
    tail = Delta(first.end, Cursor(2, 5), (), "xyz")
    bus = FakeBus()
    end = Finished(tail.end, finished_after([first]).reason, Usage(3, 2))
    bus.subscription.items.extend([first, tail, end])
    got, output = await read_to_end(await open_stream(FakeStore(), bus))
    assert got == [first, tail]
    assert output == end


async def test_another_history_of_the_same_length_is_never_spliced_on() -> None:
    original = log_of(["ab", "cd"])
    bus = FakeBus()
    bus.subscription.items.extend(original)
    stream = await open_stream(FakeStore(), bus)
    assert await stream.get(1) == original[0]
    assert await stream.get(1) == original[1]
    other = log_of(["XY"], start=original[0].end, first_token=70)
    bus.subscription.items.extend([RESYNC, other[0]])
    stream._store.log = [original[0], *other]  # type: ignore[attr-defined]
    _, end = await read_to_end(stream)
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.STREAM_DIVERGED


async def test_a_log_written_anew_up_to_the_very_cursor_is_never_spliced_on() -> None:
    """Its tail was cut, other tokens of the same length came, and every frame of it was lost."""
    original = log_of(["a", "b"])
    bus, store = FakeBus(), FakeStore()
    bus.subscription.items.extend(original)
    stream = await open_stream(store, bus)
    assert await stream.get(1) == original[0]
    assert await stream.get(1) == original[1]
    anew = log_of(["X", "Y"], start=original[0].end, first_token=70)
    store.log = [original[0], *anew, finished_after(anew)]
    store.visible = 4
    bus.subscription.items.append(RESYNC)
    got, end = await read_to_end(stream)
    assert got == []
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.STREAM_DIVERGED


async def test_a_log_that_ends_before_the_reader_is_an_error_not_a_stop() -> None:
    deltas = log_of(["ab", "cd"])
    bus = FakeBus()
    bus.subscription.items.extend([*deltas, finished_after(deltas[:1])])
    got, end = await read_to_end(await open_stream(FakeStore(), bus))
    assert got == deltas
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.STREAM_DIVERGED


async def test_a_vanished_job_ends_as_lost() -> None:
    store, bus = FakeStore(), FakeBus()
    store.record = None
    _, end = await read_to_end(await open_stream(store, bus))
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST


async def test_a_job_that_its_worker_puts_back_in_time_goes_on() -> None:
    """Several looks miss it before a worker that was slow to connect writes it again."""
    deltas = log_of(["a", "b"])
    store, bus = FakeStore(deltas), FakeBus()
    store.visible = 1
    relay = EventRelay(store, bus, silence_s=SILENCE_S, patience_s=60.0)  # type: ignore[arg-type]
    stream = await relay.open("0-x", START)
    assert await stream.get(1) == deltas[0]
    record, store.record, looks = store.record, None, store.looks
    while store.looks < looks + 4:
        assert await stream.get(0.05) is None
    store.record = record
    store.log.append(finished_after(deltas))
    store.visible = 3
    got, end = await read_to_end(stream)
    assert (got, end) == (deltas[1:], finished_after(deltas))


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_job_is_lost_once_it_was_missing_for_the_whole_patience(comes_back: bool) -> None:
    """A new connection begins the patience anew: its worker has to connect as well."""
    store, bus, patience_s = FakeStore(), FakeBus(), 0.5
    relay = EventRelay(store, bus, silence_s=SILENCE_S, patience_s=patience_s)  # type: ignore[arg-type]
    stream = await relay.open("0-x", START)
    assert await stream.get(0.01) is None
    began_s, store.record = time.monotonic(), None
    if comes_back:
        while time.monotonic() < began_s + patience_s / 2:
            assert await stream.get(0.01) is None
        began_s = time.monotonic()
        bus.subscription.items.append(RESYNC)
    _, end = await read_to_end(stream)
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST
    assert time.monotonic() - began_s >= patience_s


async def test_an_untouched_job_that_the_store_forgot_is_submitted_once_more() -> None:
    store, bus, deltas = FakeStore(), FakeBus(), log_of(["a"])
    store.record = None
    submits: list[str] = []

    async def submit() -> None:
        submits.append("submit")

    async def resubmit() -> Restored:
        submits.append("resubmit")
        if len(submits) == 2:
            raise QueueFull("memory", 1.0)
        if len(submits) == 3:
            raise TransportError("away")
        store.record = record_of(JobState.QUEUED)
        store.log = [*deltas, finished_after(deltas)]
        store.visible = 2
        return Restored.RESTORED

    stream = await relay_over(store, bus).open("0-x", START, submit, resubmit)
    got, end = await read_to_end(stream)
    assert (got, end) == (deltas, finished_after(deltas))
    assert submits == ["submit", *["resubmit"] * 3]


async def test_an_untouched_job_that_has_ended_is_not_submitted_again() -> None:
    store, bus, resubmits = FakeStore(), FakeBus(), []
    store.record = None

    async def resubmit() -> Restored:
        resubmits.append(1)
        return Restored.OVER

    _, end = await read_to_end(await relay_over(store, bus).open("0-x", START, None, resubmit))
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST
    assert len(resubmits) == 1


async def test_a_resubmission_that_keeps_failing_interrupts() -> None:
    store, bus = FakeStore(), FakeBus()
    store.record = None

    async def resubmit() -> Restored:
        raise TransportError("away")

    relay = relay_over(store, bus, outage_s=0.2)
    with pytest.raises(StreamInterrupted):
        await read_to_end(await relay.open("0-x", START, None, resubmit))


async def test_the_record_says_an_end_that_the_log_does_not() -> None:
    deltas = log_of(["abc"])
    store, bus = FakeStore(deltas), FakeBus()
    store.record = record_of(JobState.FINISHED, 3, "stop")
    _, end = await read_to_end(await open_stream(store, bus))
    assert isinstance(end, Finished)
    store.record = record_of(JobState.EXPIRED, 3, "deadline_exceeded")
    _, end = await read_to_end(await open_stream(store, FakeBus()))
    assert isinstance(end, Failed)
    assert (end.state, end.code) == (JobState.EXPIRED, "deadline_exceeded")
    store.record = record_of(JobState.FINISHED, 9, "stop")
    _, end = await read_to_end(await open_stream(store, FakeBus()))
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST


async def test_a_store_that_stays_away_interrupts_and_says_where() -> None:
    deltas = log_of(["ab"])
    store, bus = FakeStore(deltas), FakeBus()
    stream = await relay_over(store, bus, outage_s=0.1).open("0-x", START)
    assert await stream.get(1) == deltas[0]
    store.failures = 10**6
    bus.subscription.items.append(RESYNC)
    with pytest.raises(StreamInterrupted) as caught:
        await read_to_end(stream)
    assert caught.value.cursor == deltas[0].end


async def test_a_quiet_stream_is_looked_at_and_does_not_read_its_log() -> None:
    store, bus = FakeStore(log_of(["ab"])), FakeBus()
    stream = await open_stream(store, bus)
    assert await stream.get(1) is not None
    reads = store.reads
    while store.looks < 4:
        assert await stream.get(0.05) is None
    assert store.reads == reads
    await stream.aclose()


async def test_a_store_that_is_away_interrupts_a_stream_that_only_waits() -> None:
    store, bus = FakeStore(), FakeBus()
    stream = await relay_over(store, bus, outage_s=0.1).open("0-x", START)
    assert await stream.get(0.01) is None
    store.failures = 10**6
    with pytest.raises(StreamInterrupted):
        await read_to_end(stream)
    await stream.aclose()


async def test_a_log_that_was_rolled_back_is_compared_once_it_is_as_long_again() -> None:
    """It was too short when the connection came back, and no frame of what follows is heard."""
    original = log_of(["a", "b"])
    bus, store = FakeBus(), FakeStore(original)
    stream = await open_stream(store, bus)
    assert [await stream.get(1), await stream.get(1)] == original
    store.visible = 0
    bus.subscription.items.append(RESYNC)
    looks = store.looks
    while store.looks < looks + 2:
        assert await stream.get(0.05) is None
    store.log = log_of(["a", "X"], first_token=70)
    store.visible = 2
    got, end = await read_to_end(stream)
    assert got == []
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.STREAM_DIVERGED


async def test_a_log_that_was_lost_is_missed_at_the_jobs_end() -> None:
    deltas = log_of(["abc", "d"])
    store, bus = FakeStore(deltas), FakeBus()
    store.visible = 1
    stream = await open_stream(store, bus)
    assert await stream.get(1) == deltas[0]
    store.log, store.record = [], record_of(JobState.FINISHED, 4, "stop")
    got, end = await read_to_end(stream)
    assert got == []
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST


async def test_a_log_of_smaller_entries_than_the_frame_that_was_heard_is_read_past_them() -> None:
    """The worker's frame was one; the log has as much in more entries than two pages."""
    deltas = log_of(["a"] * (2 * PAGE_EVENTS + 2))
    frame, rest = merged(deltas[:-1]), deltas[-1]
    store, bus = FakeStore(deltas), FakeBus()
    store.visible = 0
    bus.subscription.items.append(frame)
    stream = await open_stream(store, bus)
    assert await stream.get(1) == frame
    store.visible = len(deltas)
    bus.subscription.items.append(RESYNC)
    reads = store.reads
    async with asyncio.timeout(20):
        assert await stream.get(1) == rest
    assert store.reads - reads <= 5
    assert await stream.get(4 * SILENCE_S) is None
    await stream.aclose()


async def test_get_keeps_its_time_while_the_store_is_slow_and_loses_nothing() -> None:
    deltas = log_of(["a"])
    store, bus = FakeStore([*deltas, finished_after(deltas)]), FakeBus()
    release = asyncio.Event()
    plain = store.read_log

    async def slow(job_id: str, after: Cursor, count: int = 256) -> object:
        await release.wait()
        return await plain(job_id, after, count)

    store.read_log = slow  # type: ignore[assignment, method-assign]
    stream = await open_stream(store, bus)
    assert await stream.get(0.01) is None
    assert await stream.get(0.01) is None
    release.set()
    got, _ = await read_to_end(stream)
    assert got == deltas
    assert store.reads == 1


async def test_closing_ends_a_read_in_progress_and_the_subscription() -> None:
    store, bus = FakeStore(), FakeBus()
    store.failures = 10**6
    stream = await open_stream(store, bus)
    assert await stream.get(0.01) is None
    await stream.aclose()
    await stream.aclose()
    assert bus.subscription.closed


async def test_a_read_that_fails_while_its_client_reads_nothing_is_no_error_of_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, bus = FakeStore(), FakeBus()
    store.failures = 10**6
    stream = await relay_over(store, bus, outage_s=0.2).open("0-x", START)
    assert await stream.get(0.01) is None
    await asyncio.sleep(0.5)
    await stream.aclose()
    del stream
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


TEXTS = st.lists(st.text("aé€😀", max_size=4), min_size=1, max_size=12)


@given(texts=TEXTS, data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_whatever_the_bus_loses_repeats_or_reorders_the_text_is_whole(
    texts: list[str], data: st.DataObject
) -> None:
    """Frames dropped, doubled, merged, shuffled; RESYNCs and failing reads in between."""
    deltas = log_of(texts)
    end = finished_after(deltas)
    store, bus = FakeStore([*deltas, end]), FakeBus()
    indices = data.draw(st.lists(st.integers(0, len(deltas) - 1), max_size=20))
    items: list[object] = [deltas[index] for index in indices]
    for _ in range(data.draw(st.integers(0, 4))):
        low = data.draw(st.integers(0, len(deltas) - 1))
        high = data.draw(st.integers(low, len(deltas) - 1))
        items.append(merged(deltas[low : high + 1]))
    items += [RESYNC] * data.draw(st.integers(0, 2)) + [end] * data.draw(st.integers(0, 2))
    items = data.draw(st.permutations(items))
    store.failures = data.draw(st.integers(0, 2))
    store.visible = data.draw(st.integers(0, len(store.log)))
    stop_at = data.draw(st.integers(0, len(deltas) - 1))
    after = deltas[stop_at].start
    bus.subscription.items.extend(items)  # type: ignore[arg-type]

    async def play() -> None:
        stream = await open_stream(store, bus, after)
        got: list[Delta] = []
        for _ in range(len(items) // 2):
            event = await stream.get(0)
            if isinstance(event, Delta):
                got.append(event)
            elif event is not None:
                break
        store.visible = len(store.log)
        if not stream.ended:
            rest, last = await read_to_end(stream)
            got += rest
            assert last == end
        assert_contiguous(got, after)
        text = "".join(delta.text for delta in deltas).encode()[after.num_bytes :].decode()
        assert "".join(delta.text for delta in got) == text
        tokens = [token for delta in got for token in delta.token_ids]
        assert tokens == list(range(after.num_tokens, deltas[-1].end.num_tokens))
        await stream.aclose()

    asyncio.run(play())
