"""What renders a job's response again is kept with it, for a retention of its own."""

from __future__ import annotations

import pytest

from shared.messages import MAX_REQUEST_RECORD_BYTES, InvalidParameter, JobState
from tests.support.jobs import Stream, make_job
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps, whole_log

RECORD = '{"asked": "é|\\n"}'
HOUR_MS = 3_600_000


async def ended(steps: Steps, **job: object) -> str:
    """A job that finished with one token; its id."""
    made = await steps.submit(**job)
    await steps.worker("w1")
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    return made.job_id


def kept(steps: Steps, job_id: str) -> tuple[str, str, str]:
    return steps.keys.job(job_id), steps.keys.log(job_id), steps.keys.request_record(job_id)


async def test_facts_come_back_as_submitted_and_never_reach_the_worker(
    steps: Steps,
) -> None:
    job = await steps.submit(request_record=RECORD, retain_ms=HOUR_MS)
    assert await steps.store.request_record(job.job_id) == RECORD
    await assert_every_key_expires(steps.redis, steps.keys.namespace)
    await steps.worker("w1")
    (delivery,) = await steps.pull("w1")
    assert delivery.job.request_record == ""
    assert await steps.store.request_record(job.job_id) == RECORD


async def test_a_job_without_facts_has_none(steps: Steps) -> None:
    job = await steps.submit()
    assert await steps.store.request_record(job.job_id) is None
    assert await steps.store.request_record("not an id") is None
    assert await steps.redis.exists(steps.keys.request_record(job.job_id)) == 0


def test_records_and_retention_are_bounded() -> None:
    make_job(request_record="a" * MAX_REQUEST_RECORD_BYTES)
    for wrong in (
        {"request_record": "é" * MAX_REQUEST_RECORD_BYTES},
        {"retain_ms": 0},
        {"retain_ms": 10**9},
    ):
        with pytest.raises(InvalidParameter):
            make_job(**wrong)


@pytest.mark.promise(
    "Responses: the job is the response: kept for its retention, deleted on request, not stored "
    "without `store`"
)
async def test_an_ended_job_is_kept_for_as_long_as_it_says(steps: Steps) -> None:
    job_id = await ended(steps, request_record=RECORD, retain_ms=20 * HOUR_MS)
    for key in kept(steps, job_id):
        assert 19 * HOUR_MS < await steps.redis.pttl(key) <= 20 * HOUR_MS, key
    record = await steps.record(job_id)
    assert record.extra == {}


async def test_delivery_to_its_reader_shortens_no_retention_of_its_own(
    steps: Steps,
) -> None:
    for retain_ms, least_ms in ((20 * HOUR_MS, 19 * HOUR_MS), (None, 0)):
        job_id = await ended(steps, frontend="fe1#1", retain_ms=retain_ms)
        await steps.store.detach(job_id, "fe1#1")
        assert least_ms < await steps.redis.pttl(steps.keys.log(job_id))
    assert await steps.redis.pttl(steps.keys.log(job_id)) <= 60_000


async def test_renewed_jobs_are_kept_anew_and_others_left_alone(steps: Steps) -> None:
    own = await ended(steps, request_record=RECORD, retain_ms=HOUR_MS)
    plain = await ended(steps)
    live = (await steps.submit(request_record=RECORD, retain_ms=1000)).job_id
    for job_id in (own, plain):
        for key in kept(steps, job_id):
            await steps.redis.pexpire(key, 10_000)
    await steps.store.renew([own, plain, live, "not an id"])
    for key in kept(steps, own):
        assert await steps.redis.pttl(key) > 10_000, key
    assert await steps.redis.pttl(steps.keys.job(plain)) <= 10_000
    assert await steps.redis.pttl(steps.keys.request_record(live)) > HOUR_MS / 2


async def test_only_an_ended_job_is_forgotten_and_then_nothing_is_left(
    steps: Steps,
) -> None:
    live = (await steps.submit(request_record=RECORD, retain_ms=HOUR_MS)).job_id
    assert await steps.store.forget(live) is False
    assert await steps.store.request_record(live) == RECORD
    await steps.store.cancel(live, "cancelled")
    assert await steps.store.forget(live) is True
    assert await steps.redis.exists(*kept(steps, live)) == 0
    assert await steps.store.get(live) is None
    assert await whole_log(steps, live) == []
    assert await steps.list_jobs(JobState.CANCELLED, 10) == []
    assert await steps.store.forget(live) is True
    assert await steps.store.forget("not an id") is True
    await steps.assert_counters_true()
