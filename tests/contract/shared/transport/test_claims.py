"""A job's record names the workers that had it, and which of them died."""

from __future__ import annotations

import pytest

from shared.messages import JobState
from shared.transport.ports.queue import ClaimEnd, CrashCause
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, Steps


async def lost_attempt(steps: Steps, job_id: str) -> int | None:
    (look,) = await steps.store.look([job_id])
    assert look is not None
    return look.lost_attempt


async def test_a_record_names_every_worker_that_had_the_job(steps: Steps) -> None:
    delivery = await steps.running("w1")
    job_id = delivery.job.job_id
    await steps.say("w1", Stream(delivery), [5, 6], "ab")
    await steps.die("w1")
    await steps.worker("w2")
    (second,) = await steps.queue.recover("w2", 8)
    await steps.queue.release("w2", job_id, second.attempt)
    await steps.worker("w3")
    (third,) = await steps.queue.recover("w3", 8)
    await steps.say("w3", Stream(third), [7], "c", end=FINISHED)

    record = await steps.record(job_id)
    told = [(c.attempt, c.worker_id, c.num_tokens, c.deaths) for c in record.claims]
    assert told == [(1, "w1", 0, 0), (2, "w2", 2, 1), (3, "w3", 2, 1)]
    assert record.deaths == 1
    times = [claim.claimed_ms for claim in record.claims]
    assert times == sorted(times)
    assert times[0] == record.started_ms

    ends = [(c.cause, c.last_ms is not None) for c in record.claims]
    assert ends == [("worker_lost", True), ("released", False), (None, False)]
    assert times[0] <= (record.claims[0].last_ms or 0) <= times[1]


async def test_a_record_names_a_bounded_number_of_them(steps: Steps) -> None:
    delivery = await steps.running("w1")
    for _ in range(20):
        await steps.queue.release("w1", delivery.job.job_id, delivery.attempt)
        (delivery,) = await steps.queue.recover("w1", 8)
    record = await steps.record(delivery.job.job_id)
    assert [claim.attempt for claim in record.claims] == list(range(6, 22))
    assert [claim.cause for claim in record.claims] == ["released"] * 15 + [None]
    assert (await steps.hash(delivery.job.job_id))["ends"].count("\n") == 15


@pytest.mark.parametrize(
    ("cause", "end"),
    [
        (CrashCause.ENGINE, ClaimEnd.ENGINE_DIED),
        (CrashCause.STALL, ClaimEnd.ENGINE_STALLED),
        (CrashCause.DEVICE, ClaimEnd.DEVICE_LOST),
        (CrashCause.PROVEN_DEVICE, ClaimEnd.DEVICE_LOST),
        (CrashCause.UPSTREAM, ClaimEnd.UPSTREAM_LOST),
    ],
)
async def test_a_record_says_what_ended_an_engine(
    steps: Steps, cause: CrashCause, end: ClaimEnd
) -> None:
    delivery = await steps.running("w1")
    await steps.say("w1", Stream(delivery), [5, 6], "ab")
    await steps.queue.crashed("w1", [(delivery.job.job_id, delivery.attempt)], cause)
    record = await steps.record(delivery.job.job_id)
    (claim,) = record.claims
    assert (claim.cause, claim.last_ms) == (end, record.last_ms)


async def test_a_claim_that_ended_the_job_is_not_among_those_that_did_not(steps: Steps) -> None:
    delivery = await steps.running("w1")
    job_id = delivery.job.job_id
    await steps.redis.hset(steps.keys.job(job_id), "crashes", 3)
    await steps.queue.crashed("w1", [(job_id, delivery.attempt)])
    record = await steps.record(job_id)
    assert record.state is JobState.FAILED
    assert "ends" not in await steps.hash(job_id)


async def test_a_job_that_an_older_release_gave_back_was_released(steps: Steps) -> None:
    delivery = await steps.running("w1")
    job_id = delivery.job.job_id
    await steps.queue.release("w1", job_id, delivery.attempt)
    await steps.redis.hdel(steps.keys.job(job_id), "ends")
    (look,) = await steps.store.look([job_id])
    assert look is not None
    assert (look.lost_attempt, look.cause) == (1, "released")


async def test_a_job_is_between_workers_from_the_end_of_a_lease_to_the_next_claim(
    steps: Steps,
) -> None:
    delivery = await steps.running("w1")
    job_id = delivery.job.job_id
    waiting = await steps.submit()

    async def state() -> tuple[bool, int | None]:
        """By the record and its list, and by the look."""
        (listed,) = await steps.list_jobs(JobState.RUNNING, 8)
        record = await steps.record(job_id)
        assert listed.is_worker_lost == record.is_worker_lost
        assert await lost_attempt(steps, waiting.job_id) is None
        return record.is_worker_lost, await lost_attempt(steps, job_id)

    assert await state() == (False, None)
    await steps.say("w1", Stream(delivery), [5, 6], "ab")
    await steps.die("w1")
    assert await state() == (True, 1)
    await steps.worker("w2")
    (second, _) = [*await steps.queue.recover("w2", 8), *await steps.pull("w2")]
    assert await lost_attempt(steps, job_id) is None
    await steps.queue.release("w2", job_id, second.attempt)
    assert await lost_attempt(steps, job_id) == 2


async def test_no_worker_is_lost_by_an_outage_of_the_server(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.queue.declare_dead("w1")
    await steps.redis.hset(steps.keys.pulse, "at_ms", 1)
    assert not (await steps.record(delivery.job.job_id)).is_worker_lost
    assert await lost_attempt(steps, delivery.job.job_id) is None


async def test_a_claim_that_is_taken_back_after_a_loss_is_named_again(
    steps: Steps,
) -> None:
    """The server has lost the claim alone, as the last part of its file."""
    await steps.worker("w1")
    job = await steps.submit()
    before = await steps.hash(job.job_id)
    (delivery,) = await steps.pull("w1")
    assert delivery.snapshot is not None
    key = steps.keys.job(job.job_id)
    await steps.redis.delete(key)
    await steps.redis.hset(key, mapping=before)
    await steps.queue.restore("w1", job.job_id, delivery.attempt, delivery.snapshot, 10)
    (claim,) = (await steps.record(job.job_id)).claims
    assert (claim.attempt, claim.worker_id) == (1, "w1")
    await steps.queue.restore("w1", job.job_id, delivery.attempt, delivery.snapshot, 10)
    assert (await steps.record(job.job_id)).claims == (claim,)
