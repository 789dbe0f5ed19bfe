"""Dead letters: kept whole and bounded, run again once, thrown away."""

from __future__ import annotations

import asyncio

import pytest

from shared.keys import new_job_id
from shared.messages import Job, JobState, OnDisconnect
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from shared.transport.ports.dead_letters import DeadLetter, Requeued
from tests.support.jobs import LIMITS, MODEL
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import Steps

LETTERS_MAX = 1000


async def poison(steps: Steps, **job: object) -> Job:
    """A job that killed its last engine a moment ago."""
    await steps.worker("w1")
    made = await steps.submit(**job)
    (delivery,) = await steps.pull("w1")
    await steps.redis.hset(steps.keys.job(made.job_id), "crashes", 3)
    await steps.queue.crashed("w1", [(made.job_id, delivery.attempt)])
    return made


def again(job: Job) -> Job:
    return Job(**{name: getattr(job, name) for name in job.__slots__} | {"job_id": new_job_id()})


async def test_a_letter_says_what_happened_and_keeps_the_request(transport: RedisTransport) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    job = await poison(steps, tenant="acme", request_record="a record", prompt_token_ids=(7, 8, 9))
    assert (await steps.hash(job.job_id))["reason"] == "poison"
    (letter,) = await letters.list(None, 10)
    assert letter == await letters.get(job.job_id)
    assert letter == DeadLetter(
        job.job_id, MODEL, "acme", "generate", "poison", 4, 0, letter.died_ms
    )
    assert await letters.request(job.job_id) == job
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_a_letter_with_the_index_of_its_record_alone_is_run_without_a_record(
    transport: RedisTransport,
) -> None:
    """A worker of an older release writes the index of parts as if it were the record."""
    steps, letters = Steps(transport), transport.dead_letters
    job = await poison(steps)
    await steps.redis.hset(steps.keys.dead_letter(job.job_id), "facts", "#9000\n {}\n-abc")
    kept = await letters.request(job.job_id)
    assert kept is not None
    assert kept.request_record == ""
    assert await steps.store.requeue(job.job_id, again(kept), LIMITS)


async def test_a_letter_is_run_again_as_a_job_without_a_history(transport: RedisTransport) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    job = await poison(steps)
    new = again(job)
    assert await steps.store.requeue(job.job_id, new, LIMITS) == new.job_id
    (delivery,) = await steps.pull("w1")
    assert (delivery.job, delivery.attempt, delivery.crashes) == (new, 1, 0)
    assert await letters.list(None, 10) == []
    assert await letters.get(job.job_id) == Requeued("default", new.job_id)
    assert await letters.request(job.job_id) is None
    assert (await steps.store.get(job.job_id)).state is JobState.FAILED  # type: ignore[union-attr]
    await assert_every_key_expires(steps.redis, steps.keys.namespace)
    await steps.assert_counters_true()


@pytest.mark.promise("Access: a job that crashed workers is kept, and can be requeued once")
async def test_a_dead_letter_is_requeued_once(steps: Steps) -> None:
    job = await poison(steps)
    news = [again(job) for _ in range(6)]
    taken = await asyncio.gather(*(steps.store.requeue(job.job_id, new, LIMITS) for new in news))
    assert len(set(taken)) == 1
    assert taken[0] in {new.job_id for new in news}
    assert len(await steps.pull("w1")) == 1
    late = again(job)
    assert await steps.store.requeue(job.job_id, late, LIMITS) == taken[0]
    assert await steps.store.get(late.job_id) is None


async def test_letters_are_as_old_as_the_clock_of_their_entries_shows(
    steps: Steps,
) -> None:
    first = await poison(steps)
    await steps.store.reap()
    await steps.submit(timeout_ms=600_000)  # with a live job the skew stays
    await steps.redis.hset(steps.keys.pulse, "skew_ms", -8 * 86_400_000)
    second = await steps.submit()
    claimed = {found.job.job_id: found for found in await steps.pull("w1")}
    await steps.redis.hset(steps.keys.job(second.job_id), "crashes", 3)
    await steps.queue.crashed("w1", [(second.job_id, claimed[second.job_id].attempt)])
    letters = await steps.transport.dead_letters.list(None, 10)
    assert {letter.job_id for letter in letters} == {first.job_id, second.job_id}


async def test_no_letter_no_job(steps: Steps) -> None:
    job = await steps.submit()
    assert await steps.store.requeue("0-nobody", again(job), LIMITS) is None
    assert await steps.store.requeue(job.job_id, again(job), LIMITS) is None
    assert (await steps.registry.queue_stats()).queued == 1


async def test_a_full_queue_keeps_the_letter(steps: Steps) -> None:
    job = await poison(steps)
    await steps.submit()
    with pytest.raises(QueueFull):
        await steps.store.requeue(job.job_id, again(job), AdmissionLimits(max_queued_jobs=1))
    assert isinstance(await steps.transport.dead_letters.get(job.job_id), DeadLetter)


async def test_a_letter_that_is_thrown_away_is_gone(transport: RedisTransport) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    job = await poison(steps)
    assert await letters.drop(job.job_id)
    assert not await letters.drop(job.job_id)
    assert await letters.get(job.job_id) is None
    assert await letters.list(None, 10) == []
    assert await steps.store.requeue(job.job_id, again(job), LIMITS) is None


async def test_letters_are_listed_newest_first_by_tenant(transport: RedisTransport) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    jobs = [await poison(steps, tenant="ab"[at % 2]) for at in range(5)]
    names = [job.job_id for job in jobs][::-1]
    assert [letter.job_id for letter in await letters.list(None, 10)] == names
    assert [letter.job_id for letter in await letters.list("a", 10)] == names[::2]
    assert [letter.job_id for letter in await letters.list("a", 2)] == names[:4:2]
    assert await letters.list("c", 10) == []


async def test_the_oldest_letters_make_room(transport: RedisTransport) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    old = await poison(steps)
    large = await poison(steps)
    pipe = steps.redis.pipeline(transaction=False)
    for at in range(LETTERS_MAX - 2):
        pipe.xadd(steps.keys.dead_letters, {"id": f"0-{at}", "bytes": 10})
    await pipe.execute()
    newest = await poison(steps)
    assert await steps.redis.xlen(steps.keys.dead_letters) == LETTERS_MAX
    assert await letters.get(old.job_id) is None
    assert await letters.request(large.job_id) == large
    # As if what came after the first were almost all that may be kept: its tenant makes room.
    await steps.redis.xadd(steps.keys.dead_letters, {"id": "0-huge", "bytes": 64 * 2**20 - 1})
    last = await poison(steps)
    kept = [letter.job_id for letter in await letters.list(None, 10)]
    assert kept == [last.job_id, newest.job_id]


async def test_a_request_too_large_to_keep_leaves_a_letter_without_it(
    transport: RedisTransport,
) -> None:
    steps, letters = Steps(transport), transport.dead_letters
    delivery = await steps.running()
    job_id = delivery.job.job_id
    # Made by the server: to send so much takes longer than a command may, where much else runs.
    await steps.redis.setrange(steps.keys.request(job_id), 64 * 2**20, b"x")
    await steps.redis.expire(steps.keys.request(job_id), 600)
    await steps.redis.hset(steps.keys.job(job_id), "crashes", 3)
    await steps.queue.crashed("w1", [(job_id, delivery.attempt)])
    assert isinstance(await letters.get(job_id), DeadLetter)
    assert await letters.request(job_id) is None


async def test_a_requeued_job_is_no_orphan(steps: Steps) -> None:
    job = await poison(steps, on_disconnect=OnDisconnect.CANCEL)
    new = again(job)
    await steps.store.requeue(job.job_id, new, LIMITS)
    assert await steps.store.reap() == 0
    assert await steps.store.reap() == 0
    assert (await steps.hash(new.job_id))["state"] == "queued"
