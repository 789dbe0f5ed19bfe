"""A job's record names the workers that had it, and which of them died."""

from __future__ import annotations

from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, Steps


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


async def test_a_record_names_a_bounded_number_of_them(steps: Steps) -> None:
    delivery = await steps.running("w1")
    for _ in range(20):
        await steps.queue.release("w1", delivery.job.job_id, delivery.attempt)
        (delivery,) = await steps.queue.recover("w1", 8)
    record = await steps.record(delivery.job.job_id)
    assert [claim.attempt for claim in record.claims] == list(range(6, 22))


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
