"""A job may wait so long until it is begun for the first time, and no longer."""

from __future__ import annotations

import pytest

from shared.messages import Failed, JobState, OnDisconnect, SamplingParams
from shared.transport.ports.admission import AdmissionLimits
from tests.contract.shared.transport.test_admission import large, measure, refusal
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, Steps, whole_log

HOUR_MS = 3_600_000


async def queue_deadline_passed(steps: Steps, job_id: str) -> None:
    await steps.deadline_passed(job_id, "queue_deadline_ms")


async def assert_waited_in_vain(steps: Steps, job_id: str) -> None:
    (end,) = await whole_log(steps, job_id)
    assert isinstance(end, Failed)
    assert (end.state, end.code) == (JobState.EXPIRED, "queue_timeout")
    assert "within its queue timeout" in end.message
    record = await steps.record(job_id)
    assert (record.state, record.reason, record.attempt) == (JobState.EXPIRED, "queue_timeout", 0)
    assert not await steps.redis.exists(steps.keys.queued_deadlines, steps.keys.request(job_id))
    await steps.assert_counters_true()


async def test_reap_ends_once_what_no_worker_began_in_time(steps: Steps) -> None:
    job = await steps.submit(queue_timeout_ms=1)
    patient = await steps.submit(queue_timeout_ms=HOUR_MS, timeout_ms=2 * HOUR_MS)
    await queue_deadline_passed(steps, job.job_id)
    assert await steps.store.reap() == 1
    assert await steps.store.reap() == 0
    assert await steps.store.cancel(patient.job_id, "cancelled") is not None
    await assert_waited_in_vain(steps, job.job_id)


async def test_a_job_that_waited_too_long_is_not_delivered(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit(queue_timeout_ms=1)
    await queue_deadline_passed(steps, job.job_id)
    assert await steps.pull("w1") == []
    await assert_waited_in_vain(steps, job.job_id)
    assert await steps.store.reap() == 0


@pytest.mark.parametrize("how", ["released", "worker lost", "engine died", "reply lost"])
async def test_a_job_once_begun_is_not_subject_to_it_again(steps: Steps, how: str) -> None:
    job = (await steps.running(queue_timeout_ms=HOUR_MS, timeout_ms=2 * HOUR_MS)).job
    job_id = job.job_id
    assert not await steps.redis.exists(steps.keys.queued_deadlines)
    await steps.redis.hset(steps.keys.job(job_id), "queue_deadline_ms", 1)
    assert list(await steps.heartbeat("w1", running=[(job_id, 1)])) == []
    worker = "w1"
    if how == "released":
        await steps.queue.release("w1", job_id, 1)
    elif how == "engine died":
        await steps.queue.crashed("w1", [(job_id, 1)])
    elif how == "worker lost":
        await steps.die("w1")
        worker = await steps.worker("w2")
    assert await steps.store.reap() == 0
    if how == "reply lost":
        (again,) = await steps.queue.reconcile(worker, frozenset())
    else:
        (again,) = await steps.queue.recover(worker, 8)
    assert (again.job, again.attempt) == (job, 2)
    assert await steps.store.reap() == 0
    stream = Stream(again)
    assert (await steps.say(worker, stream, [5], "a", end=FINISHED)).status == "ok"
    await steps.assert_counters_true()


async def test_a_job_once_begun_and_put_back_still_has_its_deadline(
    steps: Steps,
) -> None:
    job_id = (await steps.running(queue_timeout_ms=HOUR_MS, timeout_ms=2 * HOUR_MS)).job.job_id
    await steps.queue.release("w1", job_id, 1)
    for name in ("queue_deadline_ms", "deadline_ms"):
        await steps.redis.hset(steps.keys.job(job_id), name, 1)
    await steps.redis.zadd(steps.keys.live, {job_id: 1})
    assert await steps.store.reap() == 1
    assert (await steps.record(job_id)).reason == "deadline_exceeded"


async def test_a_mark_that_an_older_release_left_ends_nothing(steps: Steps) -> None:
    """Its claim knows nothing of queue timeouts."""
    job_id = (await steps.running(queue_timeout_ms=HOUR_MS, timeout_ms=2 * HOUR_MS)).job.job_id
    await steps.redis.zadd(steps.keys.queued_deadlines, {job_id: 1, "0-gone": 1})
    assert await steps.store.reap() == 0
    assert not await steps.redis.exists(steps.keys.queued_deadlines)
    assert (await steps.record(job_id)).state is JobState.RUNNING


@pytest.mark.parametrize("is_claimed", [True, False])
async def test_of_both_deadlines_it_is_the_jobs_own_that_ends_it(
    steps: Steps, is_claimed: bool
) -> None:
    await steps.worker("w1")
    job = await steps.submit(queue_timeout_ms=1, timeout_ms=2)
    await steps.deadline_passed(job.job_id)
    if is_claimed:
        assert await steps.pull("w1") == []
    else:
        assert await steps.store.reap() == 1
    assert (await steps.record(job.job_id)).reason == "deadline_exceeded"
    assert not await steps.redis.exists(steps.keys.queued_deadlines)


async def test_one_that_is_not_shorter_than_the_deadline_is_none(steps: Steps) -> None:
    job = await steps.submit(queue_timeout_ms=HOUR_MS, timeout_ms=HOUR_MS)
    assert "queue_deadline_ms" not in await steps.hash(job.job_id)
    assert not await steps.redis.exists(steps.keys.queued_deadlines)
    assert (await steps.record(job.job_id)).queue_deadline_ms is None


async def test_its_keys_cover_the_deadline_and_the_order_of_jobs_is_theirs(
    steps: Steps,
) -> None:
    hasty = await steps.submit(queue_timeout_ms=1000, timeout_ms=48 * HOUR_MS)
    record = await steps.record(hasty.job_id)
    assert record.queue_deadline_ms == record.submitted_ms + 1000
    assert record.deadline_ms == record.submitted_ms + 48 * HOUR_MS
    for key in (
        steps.keys.job(hasty.job_id),
        steps.keys.request(hasty.job_id),
        steps.keys.queued_deadlines,
    ):
        assert await steps.redis.pttl(key) > 48 * HOUR_MS, key
    assert await steps.redis.zscore(steps.keys.live, hasty.job_id) == record.deadline_ms


async def test_a_repeated_submit_does_not_begin_the_wait_anew(steps: Steps) -> None:
    job = await steps.submit(queue_timeout_ms=HOUR_MS, timeout_ms=2 * HOUR_MS)
    before = await steps.redis.zscore(steps.keys.queued_deadlines, job.job_id)
    await steps.redis.zadd(steps.keys.queued_deadlines, {job.job_id: before - 5})
    await steps.transport.store.submit(job, AdmissionLimits(), "")
    assert await steps.redis.zscore(steps.keys.queued_deadlines, job.job_id) == before - 5


async def test_every_other_end_takes_the_mark_away(steps: Steps) -> None:
    waiting = {"queue_timeout_ms": HOUR_MS, "timeout_ms": 2 * HOUR_MS}
    cancelled = await steps.submit(**waiting)
    await steps.store.cancel(cancelled.job_id, "cancelled")
    orphan = await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.CANCEL, **waiting)
    await steps.store.detach(orphan.job_id, "fe1")
    assert (await steps.record(orphan.job_id)).state is JobState.CANCELLED
    assert not await steps.redis.exists(steps.keys.queued_deadlines)


async def test_who_would_not_be_begun_in_time_is_refused_at_once(steps: Steps) -> None:
    """By the work that goes before: what the job itself takes comes after its beginning."""
    for number in range(5):
        await steps.submit(tenant=f"t{number}", **large())
    await measure(steps, tokens_per_s=200)
    early = await refusal(steps, **large(queue_timeout_ms=24_000, tenant="new"))
    assert early.scope == "queue_timeout"
    late = await refusal(steps, **large(queue_timeout_ms=24_000, timeout_ms=20_000, tenant="new"))
    assert late.scope == "deadline"
    await steps.submit(**large(queue_timeout_ms=26_000, tenant="new"))
    await steps.assert_counters_true()


async def test_what_a_tenant_was_charged_for_waiting_in_vain_is_given_back(
    steps: Steps,
) -> None:
    limits = AdmissionLimits(tokens_per_minute=110)
    sampling = SamplingParams(max_tokens=100, seed=1)
    job = await steps.submit(limits=limits, queue_timeout_ms=1, sampling=sampling)
    assert (await refusal(steps, limits, sampling=sampling)).scope == "tokens_per_minute"
    await queue_deadline_passed(steps, job.job_id)
    assert await steps.store.reap() == 1
    await steps.submit(limits=limits, sampling=sampling)
