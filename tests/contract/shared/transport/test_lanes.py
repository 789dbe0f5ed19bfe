"""Lanes: their order, and that no job waits for ever."""

from __future__ import annotations

import asyncio
import random

from shared.messages import JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import ClaimEnd
from tests.support.jobs import MODEL, Stream
from tests.support.transport_steps import FINISHED, Steps, other_process

OLDEST_EVERY = 8


async def lane_of(steps: Steps, job_id: str) -> int:
    return int((await steps.hash(job_id))["q"][-1])


async def end(steps: Steps, *jobs: Stream) -> None:
    for job in jobs:
        assert (await steps.say("w1", job, [5], "a", end=FINISHED)).status == "ok"


async def test_a_tenant_goes_back_a_lane_for_each_doubling_of_what_it_has_waiting(
    steps: Steps,
) -> None:
    await steps.submit(tenant="other")
    jobs = [await steps.submit(tenant="big") for _ in range(300)]
    lanes = [await lane_of(steps, job.job_id) for job in jobs]
    assert lanes == [min(7, (before + 1).bit_length() - 1) for before in range(300)]
    await steps.assert_counters_true()


async def test_a_small_tenant_does_not_wait_for_a_flood(steps: Steps) -> None:
    await steps.worker("w1")
    for _ in range(200):
        await steps.submit(tenant="flood")
    small = [(await steps.submit(tenant="small")).job_id for _ in range(3)]
    # Before them: at most the flood's first three, which are in the same lanes, and the job that
    # is taken for its age.
    taken = [delivery.job.job_id for delivery in await steps.pull("w1", 7)]
    assert set(small) <= set(taken)


async def test_every_eighth_job_taken_is_the_oldest_that_waits(steps: Steps) -> None:
    await steps.worker("w1")
    old = [(await steps.submit(tenant="batch", lane=7)).job_id for _ in range(3)]
    taken: list[str] = []
    for number in range(OLDEST_EVERY * 4):
        await steps.submit(tenant=f"t{number}")  # one comes for each that is taken
        (delivery,) = await steps.pull("w1", 1)
        taken.append(delivery.job.job_id)
        await end(steps, Stream(delivery))
    places = [taken.index(job_id) + 1 for job_id in old]
    assert places == [OLDEST_EVERY, OLDEST_EVERY * 2, OLDEST_EVERY * 3]


async def test_the_turn_of_the_oldest_comes_however_many_are_taken_at_once(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    old = (await steps.submit(tenant="batch", lane=7)).job_id
    young = [(await steps.submit(tenant=f"t{at}")).job_id for at in range(20)]
    taken = [delivery.job.job_id for delivery in await steps.pull("w1", 20)]
    assert taken == [*young[:7], old, *young[7:19]]
    assert [delivery.job.job_id for delivery in await steps.pull("w1", 20)] == young[19:]


async def test_each_worker_takes_the_oldest_in_its_turn(transport: RedisTransport) -> None:
    steps, others = Steps(transport), other_process(transport)
    await steps.worker("w1")
    await others.worker("w2")
    old = (await steps.submit(tenant="batch", lane=7)).job_id
    for number in range(OLDEST_EVERY):
        await steps.submit(tenant=f"t{number}")
        await steps.submit(tenant=f"u{number}")
        (first,) = await steps.pull("w1", 1)
        (second,) = await others.pull("w2", 1)
        if old in (first.job.job_id, second.job.job_id):
            return
    raise AssertionError("the oldest starves")


async def test_a_tenant_alone_in_the_queue_is_served_in_its_order(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    rng = random.Random(5)
    submitted: list[str] = []
    taken: list[str] = []
    for _ in range(60):
        for _ in range(rng.randrange(6)):
            submitted.append((await steps.submit()).job_id)
        for delivery in await steps.pull("w1", rng.randint(1, 4)):
            taken.append(delivery.job.job_id)
            await end(steps, Stream(delivery))
    assert taken == submitted[: len(taken)]
    assert len(taken) > 60


async def test_a_tenants_own_batch_does_not_hold_up_its_other_jobs(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    for _ in range(200):
        await steps.submit(lane=7)
    urgent = [await steps.submit() for _ in range(2)]
    assert [await lane_of(steps, job.job_id) for job in urgent] == [0, 1]
    taken = [delivery.job.job_id for delivery in await steps.pull("w1", 2)]
    assert taken == [job.job_id for job in urgent]


async def test_a_priority_is_the_first_lane_that_a_job_may_get(steps: Steps) -> None:
    await steps.submit(tenant="other")
    lanes = [
        await lane_of(steps, (await steps.submit(tenant="a", lane=2)).job_id) for _ in range(9)
    ]
    assert lanes == [2, 2, 2, 2, 2, 2, 2, 3, 3]


async def test_what_waits_in_a_lane_is_counted_as_work(steps: Steps) -> None:
    await steps.worker("w1")

    async def work() -> dict[str, int]:
        found = await steps.redis.hgetall(steps.keys.work(MODEL))
        return {name.decode(): int(value) for name, value in found.items()}

    first = await steps.submit()  # 3 of the prompt, at most 64 of the output
    await steps.submit()
    assert await work() == {"0": 67, "1": 67}
    (delivery,) = await steps.pull("w1", 1)
    assert delivery.job == first
    assert await work() == {"0": 0, "1": 67}
    await steps.queue.release("w1", first.job_id, 1)
    assert await work() == {"0": 67, "1": 67}
    (delivery,) = await steps.queue.recover("w1", 1)
    stream = Stream(delivery)
    await steps.say("w1", stream, [5, 6, 7], "abc", end=FINISHED)
    assert await work() == {"0": 0, "1": 67, "output": 3000}
    third = await steps.submit(tenant="b")  # expected to give what others gave
    assert (await steps.hash(third.job_id))["work"] == "6"
    assert await steps.redis.pttl(steps.keys.work(MODEL)) > 0


async def test_a_full_worker_takes_what_waits_for_tenants_that_are_not_left_out(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    for _ in range(4):
        await steps.submit(tenant="flood")  # lanes 0, 1, 1, 2
    assert await steps.queue.oversubscribe("w1", 2, ["flood"]) == []
    small = (await steps.submit(tenant="small")).job_id  # lane 0, behind the flood's first
    first, taken = await steps.queue.oversubscribe("w1", 2, ["flood"])
    assert first.job.tenant == "flood"
    assert (taken.job.job_id, taken.attempt) == (small, 1)
    assert await steps.queue.oversubscribe("w1", 2, ["flood"]) == []
    two = await steps.queue.oversubscribe("w1", 2, [])
    assert [delivery.job.tenant for delivery in two] == ["flood", "flood"]
    await steps.assert_counters_true()


async def test_a_worker_without_a_lease_or_queues_takes_nothing_beyond_its_places(
    steps: Steps,
) -> None:
    await steps.queue.setup([MODEL])
    await steps.submit()
    assert await steps.queue.oversubscribe("w1", 1, []) == []
    await steps.worker("w2")
    await steps.redis.delete(*(steps.keys.queue(MODEL, lane) for lane in range(8)))
    assert await steps.queue.oversubscribe("w2", 1, []) == []


async def test_a_full_worker_takes_the_oldest_in_its_turn_too(steps: Steps) -> None:
    await steps.worker("w1")
    old = [(await steps.submit(tenant="batch", lane=7)).job_id for _ in range(2)]
    taken: list[str] = []
    for number in range(OLDEST_EVERY * 2):
        await steps.submit(tenant=f"t{number}")  # one comes for each that is taken
        (delivery,) = await steps.queue.oversubscribe("w1", 1, ["batch"])
        taken.append(delivery.job.job_id)
        await end(steps, Stream(delivery))
    places = [taken.index(job_id) + 1 for job_id in old]
    assert places == [OLDEST_EVERY, OLDEST_EVERY * 2]


async def test_a_lane_without_its_group_loses_no_claim_of_a_full_worker(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    await steps.submit(tenant="first")
    await steps.submit(tenant="second", lane=3)
    await steps.redis.xgroup_destroy(steps.keys.queue(MODEL, 3), "w")
    (taken,) = await steps.queue.oversubscribe("w1", 4, [])
    assert taken.job.tenant == "first"


async def test_a_worker_full_of_a_lower_lane_takes_what_waits_before_it(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.submit(lane=7)
    await steps.submit(lane=4)
    assert await steps.queue.overtake("w1", 4, 4, 0) == []
    urgent = (await steps.submit(tenant="b")).job_id
    taken = await steps.queue.overtake("w1", 4, 7, 0)
    assert [delivery.job.lane for delivery in taken] == [0, 4]
    assert taken[0].job.job_id == urgent
    assert await steps.queue.overtake("w1", 4, 7, 0) == []
    await steps.assert_counters_true()


async def test_a_job_that_overtakes_is_taken_when_it_comes(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.submit(lane=7)
    taking = asyncio.create_task(steps.queue.overtake("w1", 1, 7, 10_000))
    await asyncio.sleep(0.1)
    urgent = (await steps.submit(tenant="b")).job_id
    async with asyncio.timeout(5):
        (taken,) = await taking
    assert taken.job.job_id == urgent


async def test_a_job_is_left_to_a_worker_with_a_free_slot_before_it_overtakes(
    transport: RedisTransport, steps: Steps
) -> None:
    patient = other_process(transport, defer_ms=60_000)
    await steps.worker("w1")
    await steps.worker("w2")
    await patient.queue.setup([MODEL])
    await steps.pull("w2", 8)
    urgent = (await steps.submit()).job_id
    assert await patient.queue.overtake("w1", 1, 7, 0) == []
    (taken,) = await steps.pull("w2", 8)
    assert taken.job.job_id == urgent
    await steps.submit()
    await steps.redis.hdel(steps.keys.worker("w2"), "pull_ms")  # it is full now
    assert len(await patient.queue.overtake("w1", 1, 7, 0)) == 1


async def test_a_preempted_job_that_is_given_back_keeps_tokens_and_count(steps: Steps) -> None:
    row = Stream(await steps.running("w1", lane=7))
    await steps.say("w1", row, [5], "a", num_lane_preemptions=1)
    assert (await steps.record(row.job_id)).preemptions == 1
    assert await steps.queue.release("w1", row.job_id, 1, 2)
    record = await steps.record(row.job_id)
    assert (record.state, record.preemptions, record.deaths) == (JobState.QUEUED, 2, 0)
    assert record.claims[-1].cause == ClaimEnd.PREEMPTED
    await steps.worker("w2")
    assert await steps.queue.recover("w2", 1, before=7) == []
    (taken,) = await steps.queue.recover("w2", 1)
    assert (taken.output_token_ids, taken.num_lane_preemptions) == ((5,), 2)
    await steps.assert_counters_true()
