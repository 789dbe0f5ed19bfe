"""Every way to end: exactly one terminal transition, whichever comes first."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import Cursor, Delta, Failed, Finished, JobState, OnDisconnect, Usage
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import AppendStatus
from tests.support.jobs import Stream
from tests.support.polling import until
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, whole_log


async def test_a_queued_job_is_cancelled_and_never_delivered(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    result = await steps.store.cancel(job.job_id, "cancelled")
    assert result is not None
    assert (result.state, result.num_tokens, result.won) == (JobState.CANCELLED, 0, True)
    assert await steps.pull("w1") == []
    assert await steps.redis.exists(steps.keys.request(job.job_id)) == 0
    (end,) = await whole_log(steps, job.job_id)
    assert isinstance(end, Failed)
    assert (end.state, end.code, end.usage) == (JobState.CANCELLED, "cancelled", Usage(3, 0))
    assert end.message
    await steps.assert_counters_true()


@pytest.mark.promise("HTTP: a disconnect reaches the engine, also if a message is lost")
async def test_a_running_job_is_cancelled_at_once_and_its_worker_notified(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    hints = steps.queue.cancellations("w1")
    first = asyncio.create_task(anext(hints))
    channel = steps.keys.control("w1")

    async def is_listening() -> bool:
        return bool((await steps.redis.pubsub_numsub(channel))[0][1])

    await until(is_listening)
    await steps.say("w1", stream, [5, 6], "ab")
    result = await steps.store.cancel(stream.job_id, "cancelled")
    assert result is not None
    assert (result.state, result.num_tokens, result.won) == (JobState.CANCELLED, 2, True)
    assert await asyncio.wait_for(first, 10) == stream.job_id
    await hints.aclose()
    assert list(await steps.heartbeat("w1", running=[(stream.job_id, 1)])) == [stream.job_id]
    log = await whole_log(steps, stream.job_id)
    assert isinstance(log[-1], Failed)
    assert log[-1].usage == Usage(3, 2)
    await steps.assert_counters_true()


async def test_cancel_twice_gives_the_latched_state(steps: Steps) -> None:
    job = await steps.submit()
    await steps.store.cancel(job.job_id, "cancelled")
    again = await steps.store.cancel(job.job_id, "disconnected")
    assert again is not None
    assert (again.state, again.won) == (JobState.CANCELLED, False)
    assert len(await whole_log(steps, job.job_id)) == 1
    assert (await steps.registry.queue_stats()).totals == {"cancelled": 1}


async def test_cancel_of_an_unknown_job_returns_none(transport: RedisTransport) -> None:
    assert await transport.store.cancel("0-nobody", "cancelled") is None
    assert await transport.store.cancel("not an id", "cancelled") is None


async def test_a_cancel_reason_must_be_a_code(transport: RedisTransport) -> None:
    with pytest.raises(ValueError, match="reason"):
        await transport.store.cancel("0-nobody", "a|b")


@pytest.mark.promise("Runtime: cancel wins over a finish in the same step; one reason, once")
async def test_cancel_and_finish_at_once_latch_one_state(steps: Steps) -> None:
    await steps.worker("w1")
    for _ in range(20):
        await steps.submit()
    for delivery in await steps.pull("w1", 20):
        stream = Stream(delivery)
        item = stream.append([5], "a", end=FINISHED)
        (appended,), cancelled = await asyncio.gather(
            steps.queue.append("w1", LEASE_MS, [item]),
            steps.store.cancel(stream.job_id, "cancelled"),
        )
        record = await steps.record(stream.job_id)
        assert cancelled is not None
        assert cancelled.state is record.state
        assert cancelled.won is (record.state is JobState.CANCELLED)
        assert (appended.status is AppendStatus.OK) is (record.state is JobState.FINISHED)
        ends = [e for e in await whole_log(steps, stream.job_id) if not isinstance(e, Delta)]
        assert len(ends) == 1
    await steps.assert_counters_true()


async def test_reap_expires_queued_and_running_jobs_past_their_deadline(
    steps: Steps,
) -> None:
    running = await steps.running(timeout_ms=300)
    queued = await steps.submit(timeout_ms=1)
    living = await steps.submit()
    await steps.deadline_passed(running.job.job_id)
    await steps.deadline_passed(queued.job_id)
    assert await steps.store.reap() == 2
    assert await steps.store.reap() == 0
    for job_id in (running.job.job_id, queued.job_id):
        (end,) = await whole_log(steps, job_id)
        assert isinstance(end, Failed)
        assert (end.state, end.code) == (JobState.EXPIRED, "deadline_exceeded")
    assert (await steps.store.get(living.job_id)).state is JobState.QUEUED  # type: ignore[union-attr]
    await steps.assert_counters_true()


async def test_a_heartbeat_ends_a_running_job_past_its_deadline(steps: Steps) -> None:
    delivery = await steps.running(timeout_ms=200)
    job_id = delivery.job.job_id
    await steps.deadline_passed(job_id)
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == [job_id]
    assert (await steps.hash(job_id))["reason"] == "deadline_exceeded"


async def test_a_heartbeat_older_than_a_new_claim_drops_nothing(steps: Steps) -> None:
    delivery = await steps.running()
    await steps.queue.reconcile("w1", frozenset())  # attempt 2
    assert list(await steps.heartbeat("w1", running=[(delivery.job.job_id, 1)])) == []


async def test_a_heartbeat_reports_a_job_taken_by_another_worker(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.die("w1")
    await steps.worker("w2")
    assert len(await steps.queue.recover("w2", 8)) == 1
    job_id = delivery.job.job_id
    assert list(await steps.heartbeat("w1", running=[(job_id, 1), ("0-gone", 1)])) == [
        job_id,
        "0-gone",
    ]


async def test_a_plain_calls_reader_leaving_cancels_at_once(steps: Steps) -> None:
    delivery = await steps.running(frontend="fe1", on_disconnect=OnDisconnect.CANCEL)
    job_id = delivery.job.job_id
    assert await steps.attach(job_id, "fe1#7") is JobState.RUNNING
    await steps.store.detach(job_id, "fe1#7")
    (end,) = await whole_log(steps, job_id)
    assert isinstance(end, Failed)
    assert (end.state, end.code) == (JobState.CANCELLED, "disconnected")


async def test_the_submitting_frontends_reader_may_leave_without_attaching(
    steps: Steps,
) -> None:
    job = await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.CANCEL)
    await steps.store.detach(job.job_id, "fe1#3")
    assert (await steps.hash(job.job_id))["state"] == "cancelled"


async def test_grace_runs_from_the_readers_leaving_and_stops_at_the_next(
    steps: Steps,
) -> None:
    job = await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.GRACE)
    await steps.attach(job.job_id, "fe1#1")
    await steps.store.detach(job.job_id, "fe1#1")
    first = (await steps.hash(job.job_id))["orphan_ms"]
    await steps.store.detach(job.job_id, "fe1#1")
    assert (await steps.hash(job.job_id))["orphan_ms"] == first  # a repeat does not prolong it
    await steps.attach(job.job_id, "fe2#1")
    assert "orphan_ms" not in await steps.hash(job.job_id)


async def test_a_job_whose_grace_has_passed_is_never_run(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.GRACE)
    await steps.redis.hset(steps.keys.job(job.job_id), "orphan_ms", 1)
    assert await steps.pull("w1") == []
    assert (await steps.hash(job.job_id))["reason"] == "orphaned"


@pytest.mark.parametrize("policy", list(OnDisconnect))
async def test_a_dead_frontends_running_job_ends_by_its_policy(
    steps: Steps, policy: OnDisconnect
) -> None:
    delivery = await steps.running(frontend="fe1", on_disconnect=policy)
    job_id = delivery.job.job_id
    await steps.store.frontend_heartbeat("fe1", 20_000)
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
    assert "orphan_ms" not in await steps.hash(job_id)
    await steps.lose_frontend("fe1")
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
    found = await steps.hash(job_id)
    assert found["state"] == "running"
    if policy is OnDisconnect.CONTINUE:
        assert "orphan_ms" not in found
        return
    grace_ms = 4000 if policy is OnDisconnect.CANCEL else 10_000
    seconds, microseconds = await steps.redis.time()
    assert int(found["orphan_ms"]) - int(seconds) * 1000 - microseconds // 1000 <= grace_ms
    await steps.redis.hset(steps.keys.job(job_id), "orphan_ms", 1)
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == [job_id]
    found = await steps.hash(job_id)
    assert (found["state"], found["reason"]) == ("cancelled", "orphaned")


async def test_after_an_outage_no_job_is_an_orphan_for_a_while(steps: Steps) -> None:
    delivery = await steps.running(frontend="fe1", on_disconnect=OnDisconnect.CANCEL)
    job_id = delivery.job.job_id

    async def is_suspected() -> bool:
        assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
        return "orphan_ms" in await steps.hash(job_id)

    await steps.redis.delete(steps.keys.frontend("fe1"))  # its lease ran out meanwhile
    await steps.redis.hincrby(steps.keys.pulse, "at_ms", -2500)
    assert not await is_suspected()
    await steps.redis.hincrby(steps.keys.pulse, "back_ms", 60_000)  # however slow we are
    assert not await is_suspected()
    await steps.redis.delete(steps.keys.pulse)  # the five seconds are over, nobody was silent since
    assert await is_suspected()


async def test_a_log_that_was_lost_gives_the_end_and_owns_up_to_lost_text(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    await steps.redis.delete(steps.keys.log(stream.job_id))
    (at_end,) = await steps.store.read_log(stream.job_id, Cursor(1, 1))
    assert isinstance(at_end, Finished)
    (behind,) = await whole_log(steps, stream.job_id)
    assert isinstance(behind, Failed)
    assert behind.code == "job_lost"


async def test_a_reader_ahead_of_an_ended_log_gets_its_end(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    for cursor in (Cursor(9, 9), Cursor(10**30, 10**30), Cursor(2, 0)):
        (end,) = await steps.store.read_log(stream.job_id, cursor)
        assert isinstance(end, Finished)
        assert end.end == Cursor(1, 1)


@pytest.mark.promise(
    "HTTP: memory stays flat over many requests (memory of the processes, with the echo runner and "
    "with the demo model in its default tier, blocks and keys; a device's memory needs a device)"
)
async def test_gauges_heal_when_hashes_vanished_unreaped(steps: Steps) -> None:
    job = await steps.submit(timeout_ms=1)
    await steps.deadline_passed(job.job_id)
    await steps.redis.delete(steps.keys.job(job.job_id))
    assert await steps.store.reap() == 0
    await steps.assert_counters_true()
