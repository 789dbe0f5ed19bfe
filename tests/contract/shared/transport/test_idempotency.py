"""Idempotency keys: one job per key and request, decided inside the submit."""

from __future__ import annotations

import asyncio

import pytest

from shared.keys import new_job_id
from shared.messages import Idempotency, Job, JobState
from shared.transport.ports.admission import (
    AdmissionLimits,
    KeptKey,
    KeyTaken,
    QueueFull,
    Submission,
)
from shared.transport.ports.jobs import Submitted
from tests.support.jobs import LIMITS, Stream, make_job
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps

KEY = Idempotency("key", "body")
OTHER_BODY = Idempotency("key", "another body")


async def taken(steps: Steps, job: Job) -> tuple[str, bool]:
    with pytest.raises(KeyTaken) as caught:
        await steps.store.submit(job, LIMITS, "")
    assert await steps.store.get(job.job_id) is None
    return caught.value.job_id, caught.value.same_request


async def test_of_many_submits_at_once_one_makes_the_job(steps: Steps) -> None:
    jobs = [make_job(idempotency=KEY) for _ in range(20)]
    answers = await asyncio.gather(
        *(steps.store.submit(job, LIMITS, "") for job in jobs), return_exceptions=True
    )
    (first,) = [
        job.job_id
        for job, answer in zip(jobs, answers, strict=True)
        if isinstance(answer, Submission)
    ]
    refused = [answer for answer in answers if isinstance(answer, KeyTaken)]
    assert {(answer.job_id, answer.same_request) for answer in refused} == {(first, True)}
    assert len(refused) == 19
    assert (await steps.registry.queue_stats()).queued == 1


async def test_a_key_belongs_to_one_request(steps: Steps) -> None:
    job = await steps.submit(idempotency=KEY)
    assert await taken(steps, make_job(idempotency=OTHER_BODY)) == (job.job_id, False)
    assert await taken(steps, make_job(idempotency=KEY)) == (job.job_id, True)
    assert (await steps.store.submit(job, LIMITS, "")).outcome is Submitted.DUPLICATE
    await steps.submit(idempotency=Idempotency("another key", "body"))


async def test_a_key_is_kept_as_long_as_its_job(steps: Steps) -> None:
    delivery = await steps.running(timeout_ms=50_000)
    assert await steps.store.kept_key("key") is None
    job = await steps.submit(idempotency=KEY, timeout_ms=50_000)
    key = steps.keys.idempotency("key")
    assert 50_000 < await steps.redis.pttl(key) <= 50_000 + 86_400_000
    assert await steps.store.kept_key("key") == KeptKey(job.job_id, "body", JobState.QUEUED)
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    assert await steps.store.kept_key("key") == KeptKey(job.job_id, "body", JobState.FINISHED)
    left_ms = await steps.redis.pttl(key)
    assert 0 < left_ms <= await steps.redis.pttl(steps.keys.job(job.job_id)) + 1000
    assert await taken(steps, make_job(idempotency=KEY)) == (job.job_id, True)
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


@pytest.mark.parametrize("again", [KEY, OTHER_BODY])
async def test_what_failed_may_be_tried_again_as_another_job(
    steps: Steps, again: Idempotency
) -> None:
    job = await steps.submit(idempotency=KEY)
    await steps.store.cancel(job.job_id, "disconnected")
    kept = await steps.store.kept_key("key")
    assert kept is not None
    assert (kept.state, kept.is_binding) == (JobState.CANCELLED, False)
    second = await steps.submit(idempotency=again)
    kept = await steps.store.kept_key("key")
    assert kept == KeptKey(second.job_id, again.body, JobState.QUEUED)


async def test_a_key_whose_job_is_forgotten_is_free(steps: Steps) -> None:
    job = await steps.submit(idempotency=KEY)
    await steps.redis.delete(steps.keys.job(job.job_id))
    kept = await steps.store.kept_key("key")
    assert kept == KeptKey(job.job_id, "body", None)
    assert not kept.is_binding
    await steps.submit(idempotency=OTHER_BODY)


async def test_a_refused_job_takes_no_key(steps: Steps) -> None:
    await steps.submit()
    with pytest.raises(QueueFull):
        await steps.store.submit(make_job(idempotency=KEY), AdmissionLimits(max_queued_jobs=1), "")
    assert await steps.store.kept_key("key") is None


async def test_a_worker_never_sees_the_key(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit(idempotency=KEY, job_id=new_job_id())
    (delivery,) = await steps.pull("w1")
    assert delivery.job.idempotency is None
    assert delivery.job.job_id == job.job_id
