"""What the server has lost is put back, once, by who holds it; what has ended never comes back."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import START, Cursor, Delta, Finished, Idempotency, JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.jobs import TOMBSTONE_MS, Restored, Submitted
from shared.transport.ports.queue import AppendStatus, Delivery
from tests.support.jobs import LIMITS, MODEL, Stream
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps, other_process, whole_log


async def lose_everything(steps: Steps) -> None:
    """FLUSHALL, of this deployment alone; then a worker's next heartbeat."""
    keys = [key async for key in steps.redis.scan_iter(match=f"{steps.keys.prefix}*", count=1000)]
    if keys:
        await steps.redis.delete(*keys)
    await steps.worker("w1")


async def restore(
    steps: Steps, delivery: Delivery, worker: str = "w1", sure_ms: int = 10
) -> Restored:
    assert delivery.snapshot is not None
    job_id, attempt = delivery.job.job_id, delivery.attempt
    return await steps.queue.restore(worker, job_id, attempt, delivery.snapshot, sure_ms)


async def test_a_lost_job_is_put_back_whole_and_ends(steps: Steps) -> None:
    key = Idempotency(key="k" * 64, body="b" * 64)
    await steps.worker("w1")
    await steps.submit(request_record="a record", retain_ms=60_000, idempotency=key, tenant="acme")
    (delivery,) = await steps.pull("w1")
    job_id, before = delivery.job.job_id, await steps.hash(delivery.job.job_id)
    stream = Stream(delivery)
    assert (await steps.say("w1", stream, [5], "e")).status is AppendStatus.OK
    await lose_everything(steps)
    item = stream.append([6], "f")
    (gone,) = await steps.queue.append("w1", 20_000, [item])
    assert gone.status is AppendStatus.GONE

    assert await restore(steps, delivery) is Restored.RESTORED
    (gap,) = await steps.queue.append("w1", 20_000, [item])
    assert (gap.status, gap.num_tokens) == (AppendStatus.GAP, 0)
    again = Stream(delivery)
    assert (await steps.say("w1", again, [5, 6], "ef", end=FINISHED)).status is AppendStatus.OK
    after = await steps.hash(job_id)
    told_anew = {"qid", "claim_ms", "deadline_ms", "first_ms", "cached_tokens", "held", "held_log"}
    for name in before.keys() - told_anew - {"n", "b", "h", "state"}:
        assert after[name] == before[name], name
    record = await steps.record(job_id)
    assert record.state is JobState.FINISHED
    assert record.tenant == "acme"
    assert await steps.store.request_record(job_id) == "a record"
    kept = await steps.store.kept_key(key.key)
    assert kept is not None
    assert (kept.job_id, kept.body) == (job_id, key.body)
    *deltas, end = await whole_log(steps, job_id)
    assert [delta.token_ids for delta in deltas] == [(5, 6)]
    assert isinstance(end, Finished)
    await steps.assert_counters_true()
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


@pytest.mark.parametrize("skew_ms", [3_600_000, -3_600_000])
async def test_a_job_that_was_put_back_keeps_what_was_left_of_its_timeout(
    steps: Steps, skew_ms: int
) -> None:
    """What the clock was set by is lost with the job, and was part of its deadline."""
    await steps.store.reap()
    await steps.worker("w1")
    await steps.submit(timeout_ms=900_000)  # with a live job the skew stays
    await steps.redis.hset(steps.keys.pulse, "skew_ms", skew_ms)
    job = await steps.submit(timeout_ms=600_000)
    deliveries = {found.job.job_id: found for found in await steps.pull("w1")}
    delivery = deliveries[job.job_id]
    await asyncio.sleep(0.3)
    await lose_everything(steps)
    assert await restore(steps, delivery) is Restored.RESTORED
    seconds, microseconds = await steps.redis.time()
    fields = await steps.hash(job.job_id)
    left_ms = int(fields["deadline_ms"]) - (int(seconds) * 1000 + int(microseconds) // 1000)
    assert 480_000 < left_ms <= 599_750
    for index in ("live", "running"):
        score = await steps.redis.zscore(f"{steps.keys.prefix}{index}", job.job_id)
        assert score == int(fields["deadline_ms"])
    assert await steps.heartbeat("w1", running=[(job.job_id, delivery.attempt)]) == []
    assert (await steps.hash(job.job_id))["state"] == "running"


async def test_the_log_of_earlier_attempts_is_delivered_to_be_written_again(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "é")
    await steps.say("w1", stream, [6, 7], "f")
    await steps.die("w1")
    other = other_process(steps.transport)
    await other.worker("w2")
    (taken,) = await other.queue.recover("w2", 8)
    assert taken.logged == (
        Delta(START, Cursor(1, 2), (5,), "é"),
        Delta(Cursor(1, 2), Cursor(3, 3), (6, 7), "f"),
    )


async def test_putting_back_twice_changes_nothing(steps: Steps) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    assert await restore(steps, delivery) is Restored.RESTORED
    stream = Stream(delivery)
    await steps.say("w1", stream, [5], "e")
    assert await restore(steps, delivery) is Restored.RESTORED  # its first answer was lost
    assert (await steps.say("w1", stream, [6], "f")).status is AppendStatus.OK
    await steps.assert_counters_true()
    assert await steps.heartbeat("w1", running=[(delivery.job.job_id, delivery.attempt)]) == []


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_job_that_was_put_back_is_delivered_to_one_worker(
    steps: Steps, is_full: bool
) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    assert await restore(steps, delivery) is Restored.RESTORED
    waiting = await steps.submit()
    other = other_process(steps.transport)
    await other.worker("w2")
    if is_full:
        taken = [*await other.queue.oversubscribe("w2", 4, ())]
        taken += await other.pull("w2")
    else:
        taken = [*await other.pull("w2")]
    assert [found.job for found in taken] == [waiting]
    assert await steps.pull("w1") == []
    stream = Stream(delivery)
    assert (await steps.say("w1", stream, [5], "e", end=FINISHED)).status is AppendStatus.OK
    await steps.assert_counters_true()


async def test_when_its_worker_dies_a_job_that_was_put_back_is_taken_over(
    steps: Steps,
) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    await restore(steps, delivery)
    await steps.say("w1", Stream(delivery), [5], "e")
    other = other_process(steps.transport)
    await other.worker("w2")
    await other.pull("w2")  # it meets the entry, and leaves it to its owner
    await steps.die("w1")
    (taken,) = await other.queue.recover("w2", 8)
    assert (taken.job, taken.attempt, taken.output_token_ids) == (
        delivery.job,
        delivery.attempt + 1,
        (5,),
    )


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_job_that_its_frontend_was_first_to_submit_again(
    steps: Steps, is_claimed: bool
) -> None:
    """One that waits goes back to who holds its log; one that runs elsewhere stays there."""
    delivery = await steps.running()
    await lose_everything(steps)
    job_id = delivery.job.job_id
    assert await steps.store.submit_again(delivery.job, 60_000) is Restored.RESTORED
    other = other_process(steps.transport)
    await other.worker("w2")
    if is_claimed:
        (found,) = await other.pull("w2")
        assert await restore(steps, delivery) is Restored.FENCED
        assert (await other.say("w2", Stream(found), [5], "e")).status is AppendStatus.OK
    else:
        assert await steps.heartbeat("w1", running=[(job_id, delivery.attempt)]) == [job_id]
        assert await restore(steps, delivery) is Restored.RESTORED
        assert await other.pull("w2") == []
        assert (await steps.say("w1", Stream(delivery), [5], "e")).status is AppendStatus.OK
    await steps.assert_counters_true()


async def test_a_worker_that_takes_back_its_own_job_gets_no_drop(
    steps: Steps,
) -> None:
    """The server has the worker's own earlier attempt of a job, as before its last second."""
    first = await steps.running()
    job_id = first.job.job_id
    assert await steps.queue.release("w1", job_id, first.attempt)
    (second,) = await steps.queue.recover("w1", 8)
    await steps.redis.hset(steps.keys.job(job_id), "attempt", first.attempt)
    hints = steps.queue.cancellations("w1")
    hint = asyncio.ensure_future(anext(hints))
    await asyncio.sleep(0.2)  # until it is subscribed
    assert await restore(steps, second) is Restored.RESTORED
    other = await steps.running()
    await steps.store.cancel(other.job.job_id, "cancelled")
    assert await asyncio.wait_for(hint, 10) == other.job.job_id
    await hints.aclose()  # type: ignore[attr-defined]


async def test_what_is_known_of_waiting_work_expires_after_a_loss(
    steps: Steps,
) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    assert await restore(steps, delivery) is Restored.RESTORED
    assert await steps.queue.release("w1", delivery.job.job_id, delivery.attempt)
    assert await steps.redis.hgetall(steps.keys.work(MODEL))
    await assert_every_key_expires(steps.redis, steps.keys.namespace)
    await steps.assert_counters_true()


async def test_the_holder_of_a_later_attempt_wins(transport: RedisTransport) -> None:
    """Two workers hold the job, one of them fenced long ago; whoever is first, it stays so."""
    steps, other = Steps(transport), other_process(transport)
    first = await steps.running()
    await steps.die("w1")
    await other.worker("w2")
    (second,) = await other.queue.recover("w2", 8)
    for order in ((first, second), (second, first)):
        await lose_everything(steps)
        await other.worker("w2")
        for delivery in order:
            owner = other if delivery is second else steps
            await restore(owner, delivery, "w2" if delivery is second else "w1")
        fields = await steps.hash(first.job.job_id)
        assert (fields["owner"], fields["attempt"]) == ("w2", "2")
        await steps.assert_counters_true()


async def test_a_claim_that_was_lost_is_taken_back(steps: Steps) -> None:
    """The server is as it was before the claim: the entry waits, the hash says so."""
    await steps.worker("w1")
    job = await steps.submit()
    before = await steps.hash(job.job_id)
    (delivery,) = await steps.pull("w1")
    await lose_everything(steps)
    again = await steps.store.submit(job, LIMITS, "")
    assert again.outcome is Submitted.ACCEPTED  # the same state
    assert (await steps.hash(job.job_id)).keys() == before.keys()
    stream = Stream(delivery)
    (result,) = await steps.queue.append("w1", 20_000, [stream.append([5], "e")])
    assert result.status is AppendStatus.GONE
    assert await restore(steps, delivery) is Restored.RESTORED
    assert (await steps.say("w1", stream, [5], "e", end=FINISHED)).status is AppendStatus.OK
    assert await steps.pull("w1") == []
    await steps.assert_counters_true()


@pytest.mark.promise(
    "Responses: an accepted response ends and can be retrieved, also if Redis loses it: its worker "
    "or its frontend puts it back (while one of the two lives)"
)
@pytest.mark.parametrize("how", ["cancelled", "finished", "deleted", "expired"])
async def test_what_has_ended_does_not_come_back(steps: Steps, how: str) -> None:
    retain_ms = 50 if how == "expired" else None
    delivery = await steps.running(retain_ms=retain_ms)
    job_id = delivery.job.job_id
    if how == "finished":
        await steps.say("w1", Stream(delivery), [5], "e", end=FINISHED)
    else:
        await steps.store.cancel(job_id, "cancelled")
    if how == "deleted":
        assert await steps.store.forget(job_id)
    if how == "expired":
        while await steps.hash(job_id):
            pass
    is_gone = not await steps.hash(job_id)
    assert is_gone == (how in ("deleted", "expired"))
    assert await restore(steps, delivery) is Restored.OVER
    again = await steps.store.submit_again(delivery.job, 60_000)
    assert again is (Restored.OVER if is_gone else Restored.RESTORED)
    state = JobState.FINISHED if how == "finished" else JobState.CANCELLED
    assert list(await steps.store.states([job_id, "0-unknown"])) == [state, None]
    assert bool(await steps.hash(job_id)) is not is_gone
    await steps.assert_counters_true()
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_who_was_out_of_reach_for_too_long_puts_nothing_back(
    steps: Steps,
) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    assert await restore(steps, delivery, sure_ms=TOMBSTONE_MS) is Restored.OVER
    assert await restore(steps, delivery, sure_ms=TOMBSTONE_MS - 1) is Restored.RESTORED


async def test_no_job_is_restored_without_a_lease(steps: Steps) -> None:
    delivery = await steps.running()
    await lose_everything(steps)
    await steps.queue.declare_dead("w1")
    assert await restore(steps, delivery) is Restored.NO_LEASE
    assert await steps.hash(delivery.job.job_id) == {}


async def test_a_job_that_was_accepted_before_is_queued_again_whatever_the_limits(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit(queue_timeout_ms=30_000)
    await lose_everything(steps)
    few = AdmissionLimits(max_queued_jobs=1)
    await steps.submit(limits=few)
    for _ in range(2):  # and once more, because the answer was lost
        assert await steps.store.submit_again(job, 20_000) is Restored.RESTORED
    fields = await steps.hash(job.job_id)
    assert int(fields["deadline_ms"]) - int(fields["sub_ms"]) == 20_000
    assert job.job_id in [found.job.job_id for found in await steps.pull("w1")]
    await steps.assert_counters_true()


async def test_a_request_sent_again_under_its_key_runs_though_a_tombstone_is_there(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit(idempotency=Idempotency(key="k" * 64, body="b" * 64))
    await steps.store.cancel(job.job_id, "cancelled")
    await steps.store.forget(job.job_id)
    await steps.redis.delete(steps.keys.idempotency("k" * 64))
    assert (await steps.store.submit(job, LIMITS, "")).outcome is Submitted.ACCEPTED
    (delivery,) = await steps.pull("w1")
    assert delivery.job.model == MODEL
    await steps.redis.delete(steps.keys.job(job.job_id))
    assert await restore(steps, delivery) is Restored.RESTORED


async def test_a_tombstone_of_an_earlier_job_with_its_id_keeps_no_job_lost(steps: Steps) -> None:
    """Ids of the later prompts of a request are determined by its key, which they do not have."""
    await steps.worker("w1")
    job = await steps.submit()
    await steps.store.cancel(job.job_id, "cancelled")
    tombstone = steps.keys.tombstone(job.job_id)
    earlier = await steps.redis.get(tombstone)
    assert earlier
    now = int((await steps.hash(job.job_id))["end_ms"])
    await steps.redis.delete(steps.keys.job(job.job_id))
    await steps.store.submit(job, LIMITS, "")
    assert not await steps.redis.exists(tombstone)
    (delivery,) = await steps.pull("w1")
    # The last part of the server's file is lost: the job, and that its tombstone was deleted.
    await steps.redis.delete(steps.keys.job(job.job_id))
    for end_ms, wanted in ((now + 60_000, Restored.OVER), (now - 1, Restored.RESTORED)):
        words = earlier.replace(str(now).encode(), str(end_ms).encode(), 1)
        await steps.redis.set(tombstone, words, px=60_000)
        assert await restore(steps, delivery) is wanted
