"""Who reads a job: the mark, who takes it over, and what becomes of a job without readers."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import JobState, OnDisconnect
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, Steps

POLICIES = (OnDisconnect.CANCEL, OnDisconnect.GRACE)


async def mark(steps: Steps, job_id: str) -> str:
    return (await steps.hash(job_id))["fe"]


async def orphan(steps: Steps, job_id: str) -> None:
    """As when the grace has passed."""
    assert "orphan_ms" in await steps.hash(job_id)
    await steps.redis.hset(steps.keys.job(job_id), "orphan_ms", 1)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_reader_whose_frontend_lives_is_not_displaced(
    steps: Steps, policy: OnDisconnect
) -> None:
    job = await steps.submit(frontend="fe1#1", on_disconnect=policy)
    for reader in ("fe2#1", "fe1#2", "fe2#1"):
        assert await steps.attach(job.job_id, reader) is JobState.QUEUED
        assert await mark(steps, job.job_id) == "fe1#1"


async def test_the_next_living_reader_takes_the_mark_of_a_dead_frontend_over(
    steps: Steps,
) -> None:
    delivery = await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    job_id = delivery.job.job_id
    await steps.attach(job_id, "fe2#1")
    await steps.lose_frontend("fe1")
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []  # the clock starts
    assert "orphan_ms" in await steps.hash(job_id)
    await steps.attach(job_id, "fe2#1")
    assert "orphan_ms" not in await steps.hash(job_id)
    assert await mark(steps, job_id) == "fe2#1"
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
    await steps.attach(job_id, "fe1#1")  # it was only slow: the mark has moved
    assert await mark(steps, job_id) == "fe2#1"


async def test_a_plain_call_is_cancelled_when_its_frontend_dies_and_no_reader_follows(
    steps: Steps,
) -> None:
    delivery = await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    job_id = delivery.job.job_id
    await steps.attach(job_id, "fe2#1")  # and leaves, which cancels nothing
    await steps.store.detach(job_id, "fe2#1")
    assert (await steps.hash(job_id))["state"] == "running"
    await steps.lose_frontend("fe1")
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
    await orphan(steps, job_id)
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == [job_id]
    assert (await steps.hash(job_id))["reason"] == "orphaned"


async def test_a_plain_job_of_a_dead_frontend_does_not_begin_without_a_reader(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    read, unread = [
        (await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)).job_id
        for _ in range(2)
    ]
    await steps.lose_frontend("fe1")
    assert await steps.pull("w1") == []
    assert await steps.queue.recover("w1", 8) == []
    await steps.attach(read, "fe2#1")
    (taken,) = await steps.queue.recover("w1", 8)
    assert (taken.job.job_id, taken.attempt) == (read, 1)
    await orphan(steps, unread)
    assert await steps.queue.recover("w1", 8) == []
    found = await steps.hash(unread)
    assert (found["reason"], found["attempt"]) == ("orphaned", "0")
    await steps.assert_counters_true()


async def test_a_job_with_a_grace_period_is_begun_without_a_reader(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.GRACE)
    await steps.lose_frontend("fe1")
    assert len(await steps.pull("w1")) == 1


async def test_when_the_marked_reader_leaves_the_one_that_stays_takes_over(
    steps: Steps,
) -> None:
    job = await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.GRACE)
    await steps.attach(job.job_id, "fe1#2")
    await steps.store.detach(job.job_id, "fe1#1")
    assert "orphan_ms" in await steps.hash(job.job_id)
    await steps.attach(job.job_id, "fe1#2")
    assert "orphan_ms" not in await steps.hash(job.job_id)
    assert await mark(steps, job.job_id) == "fe1#2"
    await steps.store.detach(job.job_id, "fe1#1")  # once more: not its job any longer
    assert "orphan_ms" not in await steps.hash(job.job_id)


async def test_a_reader_without_the_mark_leaves_without_a_trace(steps: Steps) -> None:
    job = await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    await steps.attach(job.job_id, "fe2#1")
    before = await steps.hash(job.job_id)
    await steps.store.detach(job.job_id, "fe2#1")
    assert await steps.hash(job.job_id) == before


async def test_after_an_outage_the_mark_stays_where_it_is_for_a_while(
    steps: Steps,
) -> None:
    delivery = await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    await steps.redis.delete(steps.keys.frontend("fe1"))  # its lease ran out meanwhile
    await steps.redis.hincrby(steps.keys.pulse, "at_ms", -2500)
    await steps.attach(delivery.job.job_id, "fe2#1")
    assert await mark(steps, delivery.job.job_id) == "fe1#1"


async def test_many_readers_are_renewed_in_one_call(steps: Steps) -> None:
    jobs = [await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.GRACE) for _ in range(3)]
    await steps.store.cancel(jobs[0].job_id, "cancelled")
    readers = [(job.job_id, f"fe2#{at}") for at, job in enumerate(jobs)]
    strangers = [("0-nobody", "fe2#7"), ("not an id", "fe2#8")]
    states = await steps.store.attach([*readers, *strangers] * 100)
    assert states == [JobState.CANCELLED, JobState.QUEUED, JobState.QUEUED, None, None] * 100
    assert await steps.redis.pttl(steps.keys.frontend("fe2")) > 0


@pytest.mark.promise(
    "Access: readers at several frontends keep a job alive; jobs without readers leave the queue"
)
@pytest.mark.parametrize("state", ["queued", "running"])
async def test_reap_ends_the_jobs_of_dead_frontends(steps: Steps, state: str) -> None:
    job = await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    read = await steps.submit(frontend="fe2#1", on_disconnect=OnDisconnect.CANCEL)
    kept = await steps.submit(frontend="fe1#2", on_disconnect=OnDisconnect.CONTINUE)
    if state == "running":
        await steps.worker("w1")
        assert len(await steps.pull("w1")) == 3
    await steps.lose_frontend("fe1")
    assert await steps.store.reap() == 0  # the clock starts
    await orphan(steps, job.job_id)
    assert await steps.store.reap() == 1
    found = await steps.hash(job.job_id)
    assert (found["state"], found["reason"], found["by"]) == ("cancelled", "orphaned", "reaper")
    for other in (read, kept):
        assert (await steps.hash(other.job_id))["state"] == state
    await steps.assert_counters_true()


async def test_reap_looks_at_every_live_job_in_turn(steps: Steps) -> None:
    jobs = [
        await steps.submit(frontend=f"fe{at % 2}#{at}", on_disconnect=OnDisconnect.CANCEL)
        for at in range(250)
    ]
    await steps.lose_frontend("fe1")
    for _ in range(3):
        assert await steps.store.reap() == 0
    for job in jobs[1::2]:
        await orphan(steps, job.job_id)
    await steps.redis.delete(steps.keys.pulse)  # however slow that was, nobody was silent
    ended = [await steps.store.reap() for _ in range(4)]
    assert (sum(ended), ended[3]) == (125, 0)
    assert max(ended) < 100
    assert (await steps.registry.queue_stats()).queued == 125
    await steps.assert_counters_true()


async def test_readers_of_an_ended_job_leave_its_record_alone(steps: Steps) -> None:
    delivery = await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)
    stream = Stream(delivery)
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    before = await steps.hash(stream.job_id)
    assert await steps.attach(stream.job_id, "fe2#1") is JobState.FINISHED
    await steps.store.detach(stream.job_id, "fe2#1")
    assert await steps.hash(stream.job_id) == before
    assert await steps.redis.pttl(steps.keys.log(stream.job_id)) > 60_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_listening", [True, False])
async def test_a_frontend_that_may_wake_has_longer_than_one_that_died(
    steps: Steps, policy: OnDisconnect, is_listening: bool
) -> None:
    """One that stands still keeps its connections; the system closes those of one that died."""
    delivery = await steps.running(frontend="fe1#1", on_disconnect=policy)
    job_id = delivery.job.job_id
    subscription = await steps.transport.bus.subscribe(job_id)
    if not is_listening:
        await steps.transport.bus.unsubscribe(subscription)
        while dict(await steps.redis.pubsub_numsub(steps.keys.channel(job_id))).popitem()[1]:
            await asyncio.sleep(0.01)
    await steps.lose_frontend("fe1")
    assert await steps.heartbeat("w1", running=[(job_id, 1)]) == []  # the clock starts
    seconds, microseconds = await steps.redis.time()
    wait_ms = int((await steps.hash(job_id))["orphan_ms"]) - seconds * 1000 - microseconds // 1000
    grace_ms = 10_000 if policy is OnDisconnect.GRACE else 0
    expected_ms = max(grace_ms, 20_000 if is_listening else 4000)
    assert expected_ms - 2000 < wait_ms <= expected_ms
    if is_listening:
        await steps.transport.bus.unsubscribe(subscription)


async def test_a_heartbeat_knows_whether_it_is_in_time(steps: Steps) -> None:
    assert not await steps.store.frontend_heartbeat("fe1", 60_000)  # the first
    assert await steps.store.frontend_heartbeat("fe1", 60_000)
    await steps.redis.delete(steps.keys.frontend("fe1"))
    assert not await steps.store.frontend_heartbeat("fe1", 60_000)
    assert await steps.redis.pttl(steps.keys.frontend("fe1")) > 0
