"""submit, pull, claim: from accepted to running."""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.keys import new_job_id
from shared.messages import JobState, Pooling
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import AdmissionLimits, QueueFull, Submission
from shared.transport.ports.jobs import Submitted
from shared.transport.ports.queue import AppendStatus
from tests.support.jobs import LIMITS, MODEL, Stream, make_job
from tests.support.polling import until
from tests.support.transport_steps import Steps


async def test_a_submitted_job_is_delivered_whole_with_attempt_one(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit(client_request_id="theirs")
    (delivery,) = await steps.pull("w1")
    assert delivery.job == job
    assert (delivery.attempt, delivery.output_token_ids) == (1, ())
    record = await steps.record(job.job_id)
    assert (record.state, record.owner, record.attempt) == (JobState.RUNNING, "w1", 1)
    assert record.client_request_id == "theirs"
    assert record.started_ms is not None
    assert record.started_ms >= record.submitted_ms
    assert record.extra == {}
    await steps.assert_counters_true()


async def test_submitting_the_same_id_again_changes_nothing(steps: Steps) -> None:
    job = await steps.submit()
    assert (await steps.store.submit(job, LIMITS, "")).outcome is Submitted.DUPLICATE
    assert await steps.redis.xlen(steps.keys.queue(MODEL, 0)) == 1
    await steps.assert_counters_true()


async def test_jobs_submitted_before_any_worker_was_set_up_are_delivered(
    steps: Steps,
) -> None:
    jobs = [await steps.submit() for _ in range(3)]
    await steps.worker("w1")
    assert [delivery.job for delivery in await steps.pull("w1")] == jobs


async def test_the_models_of_one_worker_take_turns(steps: Steps) -> None:
    names = (MODEL, "adapter", "other")
    await steps.worker("w1", names)
    for _ in range(6):
        for name in names:
            await steps.submit(model=name)
    taken = [delivery.job.model for _ in range(9) for delivery in await steps.pull("w1", 1)]
    assert {name: taken.count(name) for name in names} == dict.fromkeys(names, 3)


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        (AdmissionLimits(max_queued_jobs=2), "total"),
        (AdmissionLimits(max_queued_tokens=8), "tokens"),
        (AdmissionLimits(max_queued_jobs_per_tenant=2), "tenant"),
    ],
)
async def test_a_full_queue_refuses_before_anything_is_written(
    steps: Steps, limits: AdmissionLimits, scope: str
) -> None:
    for _ in range(2):
        await steps.submit(limits=limits)
    refused = make_job()
    with pytest.raises(QueueFull) as caught:
        await steps.store.submit(refused, limits, "")
    assert caught.value.scope == scope
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    assert await steps.store.get(refused.job_id) is None
    assert await steps.redis.exists(steps.keys.request(refused.job_id)) == 0
    lengths = [await steps.redis.xlen(queue) for queue in steps.keys.queues(MODEL)]
    assert sum(lengths) == 2
    await steps.assert_counters_true()


async def test_a_claimed_job_makes_room_in_the_queue(steps: Steps) -> None:
    limits = AdmissionLimits(max_queued_jobs=1, max_queued_tokens=3)
    await steps.worker("w1")
    await steps.submit(limits=limits)
    await steps.pull("w1")
    await steps.submit(limits=limits)
    await steps.assert_counters_true()


async def test_one_tenants_limit_does_not_bind_another(steps: Steps) -> None:
    limits = AdmissionLimits(max_queued_jobs_per_tenant=1)
    await steps.submit(limits=limits, tenant="a")
    await steps.submit(limits=limits, tenant="b")


async def test_concurrent_submits_never_exceed_the_limit(steps: Steps) -> None:
    limits = AdmissionLimits(max_queued_jobs=5)
    replies = await asyncio.gather(
        *(steps.store.submit(make_job(), limits, "") for _ in range(20)), return_exceptions=True
    )
    assert replies.count(Submission(Submitted.ACCEPTED)) == 5
    assert sum(isinstance(reply, QueueFull) for reply in replies) == 15


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "nonsense"},
        {"job_id": "1-" + new_job_id()[2:]},
        {"lane": 8},
        {"timeout_ms": 0},
        {"timeout_ms": 10**12},
        {"queue_timeout_ms": 0},
        {"queue_timeout_ms": 10**12},
    ],
)
async def test_what_cannot_be_queued_is_refused_in_words(
    transport: RedisTransport, changes: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"job id|lane|timeout_ms"):
        await transport.store.submit(make_job(**changes), LIMITS, "")


async def test_pull_takes_at_most_its_limit_over_all_lanes(steps: Steps) -> None:
    await steps.worker("w1")
    for lane in (3, 0, 7, 1):
        await steps.submit(lane=lane)
    first = await steps.pull("w1", 1)
    rest = await steps.pull("w1", 8)
    assert [delivery.job.lane for delivery in (*first, *rest)] == [0, 1, 3, 7]


async def test_the_last_lane_is_not_starved(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.submit(lane=7)
    for _ in range(12):
        await steps.submit(lane=0)
    lanes = [(await steps.pull("w1", 1))[0].job.lane for _ in range(8)]
    assert 7 in lanes


async def test_two_workers_never_get_the_same_job(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.worker("w2")
    jobs = {(await steps.submit()).job_id for _ in range(20)}
    batches = await asyncio.gather(*(steps.pull(name, 3) for name in ("w1", "w2") * 5))
    got = [delivery.job.job_id for batch in batches for delivery in batch]
    assert sorted(got) == sorted(jobs)


async def test_a_worker_without_a_lease_is_given_nothing(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.die("w1")
    await steps.submit()
    assert await steps.pull("w1") == []
    await steps.heartbeat("w1")
    assert len(await steps.pull("w1")) == 1


async def test_pull_waits_for_the_first_job_and_no_longer(steps: Steps) -> None:
    await steps.worker("w1")
    pulling = asyncio.create_task(steps.queue.pull("w1", 4, 20_000))
    await asyncio.sleep(0)
    job = await steps.submit()
    begin_s = time.monotonic()
    (delivery,) = await pulling
    assert delivery.job == job
    assert time.monotonic() - begin_s < 15


async def test_a_pull_that_is_given_up_while_it_waits_takes_nothing(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    await steps.worker("w2")
    pulling = asyncio.create_task(steps.queue.pull("w1", 4, 20_000))

    async def waits() -> bool:
        return any(one["cmd"] == "xread" for one in await steps.redis.client_list())

    await until(waits)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling

    async def is_gone() -> bool:
        return not await waits()

    await until(is_gone)
    job = await steps.submit()
    (delivery,) = await steps.pull("w2")
    assert (delivery.job, delivery.attempt) == (job, 1)


async def test_pull_returns_nothing_after_its_wait(steps: Steps) -> None:
    await steps.worker("w1")
    assert await steps.queue.pull("w1", 4, 60) == []


async def test_a_job_past_its_deadline_is_expired_instead_of_delivered(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit(timeout_ms=1)
    await steps.deadline_passed(job.job_id)
    assert await steps.pull("w1") == []
    record = await steps.record(job.job_id)
    assert (record.state, record.reason) == (JobState.EXPIRED, "deadline_exceeded")
    assert record.message
    await steps.assert_counters_true()


async def test_a_lost_pull_reply_is_healed_by_reconcile(steps: Steps) -> None:
    await steps.worker("w1")
    jobs = [await steps.submit() for _ in range(3)]
    assert len(await steps.pull("w1")) == 3  # and the reply is lost
    known = frozenset({jobs[0].job_id})
    again = await steps.queue.reconcile("w1", known)
    assert [delivery.job for delivery in again] == jobs[1:]
    assert [delivery.attempt for delivery in again] == [2, 2]
    assert await steps.queue.reconcile("w1", frozenset(job.job_id for job in jobs)) == []


async def test_reconcile_reads_more_than_one_page(steps: Steps) -> None:
    await steps.worker("w1")
    for _ in range(150):
        await steps.submit()
    assert len(await steps.pull("w1", 200)) == 150
    assert len(await steps.queue.reconcile("w1", frozenset())) == 150


async def test_a_second_claim_fences_the_first(steps: Steps) -> None:
    old = Stream(await steps.running("w1"))
    (again,) = await steps.queue.reconcile("w1", frozenset())
    refused = await steps.say("w1", old, [5], "x")
    assert refused.status is AppendStatus.FENCED
    assert (await steps.say("w1", Stream(again), [5], "x")).status is AppendStatus.OK


async def test_an_unreadable_request_fails_the_job_and_spares_the_worker(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    broken, sound = await steps.submit(), await steps.submit()
    await steps.redis.set(steps.keys.request(broken.job_id), b'{"job_id": 5', px=60_000)
    assert [delivery.job for delivery in await steps.pull("w1")] == [sound]
    record = await steps.record(broken.job_id)
    assert (record.state, record.reason) == (JobState.FAILED, "payload_invalid")


async def test_a_lost_request_fails_the_job(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    await steps.redis.delete(steps.keys.request(job.job_id))
    assert await steps.pull("w1") == []
    record = await steps.record(job.job_id)
    assert (record.state, record.reason) == (JobState.FAILED, "payload_lost")
    await steps.assert_counters_true()


async def test_a_newer_releases_job_is_left_for_a_newer_worker(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    await steps.redis.hset(steps.keys.job(job.job_id), "v", 2)
    assert await steps.pull("w1") == []
    assert await steps.queue.recover("w1", 8) == []
    await steps.redis.hset(steps.keys.job(job.job_id), "v", 1)  # now it can be read
    assert [delivery.job for delivery in await steps.queue.recover("w1", 8)] == [job]


async def test_a_vanished_stream_is_made_anew(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.redis.delete(*steps.keys.queues(MODEL))
    job = await steps.submit()

    async def pulled() -> list[str]:
        return [delivery.job.job_id for delivery in await steps.pull("w1")]

    assert await until(pulled) == [job.job_id]


async def test_an_empty_queue_entry_is_dropped(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.redis.xadd(steps.keys.queue(MODEL, 0), {"what": "is this"})
    await steps.redis.xadd(steps.keys.queue(MODEL, 0), {"id": "0-nobody"})
    assert await steps.pull("w1") == []
    assert await steps.redis.xlen(steps.keys.queue(MODEL, 0)) == 0


async def test_the_vectors_of_a_job_count_in_the_store_before_they_are_there(steps: Steps) -> None:
    pooling = Pooling((1,) * 8, 4096)
    job = await steps.submit(prompt=(1,) * 8, pooling=pooling, max_tokens=0)
    held = await steps.redis.hget(steps.keys.job(job.job_id), "held_log")
    assert int(held) == pooling.num_bytes == 8 * 4 * 4096
