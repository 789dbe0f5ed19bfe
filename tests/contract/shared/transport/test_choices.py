"""Jobs of several choices: one log, in which every token has its choice."""

from __future__ import annotations

import pytest

from shared.messages import START, Cursor, Delta, FinishReason, Segment, TokenLogprob
from shared.transport.appends import append_arguments
from shared.transport.connect import RedisTransport
from shared.transport.ports.jobs import RESYNC
from shared.transport.ports.queue import Append, AppendStatus, LoggedChoice
from shared.transport.scripts import Scripts
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, whole_log

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def test_the_text_of_several_choices_is_read_back_as_it_was(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running(num_choices=3))
    logprobs = tuple(TokenLogprob(token_id, -0.5) for token_id in (5, 6, 7))
    segments = (Segment(0, 1, 2), Segment(2, 2, 4, STOP, "E|ND"))
    await steps.say("w1", stream, [5, 6, 7], "éb|c!", logprobs=logprobs, segments=segments)
    await steps.say("w1", stream, [8], "d", segments=(Segment(1, 1, 1, LENGTH),))
    assert await whole_log(steps, stream.job_id) == [
        Delta(START, Cursor(3, 6), (5, 6, 7), "éb|c!", logprobs, segments),
        Delta(Cursor(3, 6), Cursor(4, 7), (8,), "d", None, (Segment(1, 1, 1, LENGTH),)),
    ]
    record = await steps.record(stream.job_id)
    assert record.completion_tokens == 4


@pytest.mark.promise(
    "Runtime: one channel for each job (the choices of a job share it, each delta names the choice "
    "of its segments)"
)
async def test_readers_hear_whose_tokens_they_are(steps: Steps) -> None:
    stream = Stream(await steps.running(num_choices=2))
    await steps.transport.bus.start()
    subscription = await steps.transport.bus.subscribe(stream.job_id)
    assert await subscription.get(5.0) is RESYNC
    segments = (Segment(1, 1, 3, STOP, "a|b"), Segment(0, 1, 1))
    await steps.say("w1", stream, [5, 6], "a|bc", segments=segments)
    heard = await subscription.get(5.0)
    assert heard == Delta(START, Cursor(2, 4), (5, 6), "a|bc", None, segments)


async def test_a_recovered_job_knows_where_each_choice_was(steps: Steps) -> None:
    old = Stream(await steps.running("w1", num_choices=3))
    first = (TokenLogprob(5, -0.5), TokenLogprob(6, -0.75))
    more = (TokenLogprob(7, -1.0), TokenLogprob(8, -2.0))
    segments = (Segment(0, 1, 1), Segment(2, 1, 2, STOP, 6))
    await steps.say("w1", old, [5, 6], "aé", logprobs=first, segments=segments, cached_tokens=2)
    await steps.say("w1", old, [7, 8], "c", logprobs=more, segments=(Segment(0, 2, 1),))
    await steps.die("w1")
    await steps.worker("w2")
    (taken,) = await steps.queue.recover("w2", 8)
    assert taken.choices == (
        LoggedChoice((5, 7, 8), (first[0], *more), 2),
        LoggedChoice(),
        LoggedChoice((6,), (first[1],), 2, STOP, 6),
    )
    assert (taken.end, taken.cached_tokens) == (Cursor(4, 4), 2)
    new = Stream(taken)
    end = (Segment(0, 1, 1, LENGTH), Segment(1, 1, 0, STOP))
    result = await steps.say("w2", new, [9, 9], "d", segments=end, end=FINISHED)
    assert result.status is AppendStatus.OK


async def test_a_delivery_without_a_log_has_every_choice_yet_to_run(
    transport: RedisTransport,
) -> None:
    delivery = await Steps(transport).running(num_choices=2)
    assert delivery.choices == (LoggedChoice(), LoggedChoice())


async def test_a_job_of_one_choice_has_its_whole_log(steps: Steps) -> None:
    await steps.say("w1", Stream(await steps.running("w1")), [5], "é")
    (taken,) = await steps.queue.reconcile("w1", frozenset())
    assert taken.segments is None
    assert taken.choices == (LoggedChoice((5,), (), 2),)


async def test_the_same_tokens_of_another_choice_diverge(steps: Steps) -> None:
    delivery = await steps.running(num_choices=2)
    stream, other = Stream(delivery), Stream(delivery)
    await steps.say("w1", stream, [5, 5], "ab", segments=(Segment(0, 1, 1), Segment(1, 1, 1)))
    other.accept(other.append([5, 5], "ab", segments=(Segment(0, 2, 2),)))
    result = await steps.say("w1", other, [9], "z", segments=(Segment(0, 1, 1),))
    assert result.status is AppendStatus.DIVERGED


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 1, 2),),  # a token is left over
        (Segment(0, 2, 1),),  # a byte is left over
        (Segment(0, 1, 2), Segment(1, 2, 0)),
        (Segment(0, 3, 2), Segment(1, -1, 0)),
        (Segment(-1, 2, 2),),
    ],
)
async def test_segments_that_do_not_fill_their_item_are_refused(
    steps: Steps, segments: tuple[Segment, ...]
) -> None:
    stream = Stream(await steps.running(num_choices=2))
    item = stream.append([5, 6], "ab", segments=segments)
    (result,) = await steps.queue.append("w1", LEASE_MS, [item])
    assert result.status is AppendStatus.REJECTED
    assert await _said_by_the_script(steps, item) == b"bad:segments"
    assert await whole_log(steps, stream.job_id) == []


@pytest.mark.parametrize("text", ["nonsense", "[1]", "[[0]]", '[["a",2,2]]', "3", '{"a":1}'])
async def test_what_is_no_list_of_segments_is_refused(steps: Steps, text: str) -> None:
    stream = Stream(await steps.running(num_choices=2))
    item = stream.append([5, 6], "ab", segments=(Segment(0, 2, 2),))
    assert await _said_by_the_script(steps, item, text) == b"bad:segments"


async def test_a_worker_takes_jobs_while_it_has_a_free_place(steps: Steps) -> None:
    await steps.worker("w1")
    jobs = [await steps.submit(num_choices=n) for n in (1, 2, 1, 4, 1, 1)]
    ids = [job.job_id for job in jobs]

    async def pulled(count: int) -> list[str]:
        return [delivery.job.job_id for delivery in await steps.pull("w1", count)]

    assert await pulled(2) == ids[:2]
    assert await pulled(2) == ids[2:4]  # one place was left for a job of four
    assert await pulled(3) == ids[4:]
    assert await pulled(3) == []
    record = await steps.record(ids[3])
    assert record.num_choices == 4
    assert record.extra == {}


async def test_places_are_counted_over_lanes_and_behind_jobs_that_are_gone(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    jobs = [await steps.submit(num_choices=2, lane=lane) for lane in (0, 0, 1, 1)]
    await steps.store.cancel(jobs[0].job_id, "cancelled")
    pulled = [delivery.job for delivery in await steps.pull("w1", 4)]
    assert pulled == jobs[1:3]


async def test_a_worker_recovers_jobs_while_it_has_a_free_place(steps: Steps) -> None:
    await steps.worker("w1")
    ids = [(await steps.submit(num_choices=n)).job_id for n in (2, 2, 1)]
    assert len(await steps.pull("w1", 8)) == 3
    await steps.die("w1")
    await steps.worker("w2")
    first = await steps.queue.recover("w2", 3)
    assert [delivery.job.job_id for delivery in first] == ids[:2]
    rest = await steps.queue.recover("w2", 1)
    assert [delivery.job.job_id for delivery in rest] == ids[2:]


async def test_an_end_that_is_no_choices_is_refused(steps: Steps) -> None:
    stream = Stream(await steps.running(num_choices=2))
    item = stream.append([5], "a", segments=(Segment(0, 1, 1, FinishReason.CANCELLED),))
    (result,) = await steps.queue.append("w1", LEASE_MS, [item])
    assert (result.status, result.detail) == (
        AppendStatus.REJECTED,
        "a choice ends by stop or length",
    )


async def test_a_log_that_speaks_of_a_choice_too_many_cannot_be_resumed(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running("w1", num_choices=2))
    await steps.say("w1", stream, [5], "a", segments=(Segment(2, 1, 1),))
    assert await steps.queue.reconcile("w1", frozenset()) == []
    record = await steps.record(stream.job_id)
    assert (record.state, record.reason) == ("failed", "job_lost")


async def _said_by_the_script(steps: Steps, item: Append, segments: str | None = None) -> bytes:
    """The verdict of the transition itself, whatever its caller would have refused."""
    arguments = list(append_arguments(item))
    if segments is not None:
        arguments[arguments.index("c") + 1] = segments
    scripts = Scripts(steps.keys, 600_000)
    (verdict,) = await scripts.call(steps.redis, "append", "w1", LEASE_MS, *arguments)
    assert isinstance(verdict, bytes)
    return verdict
