"""What one tenant may use: decided at the check itself, put right at the end, refilled by time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from shared.messages import SamplingParams
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from tests.support.jobs import Stream, make_job
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps

MINUTE_MS = 60_000
SAMPLING = SamplingParams(max_tokens=7, seed=7)  # with its prompt of three: ten tokens


async def refusal(steps: Steps, limits: AdmissionLimits, **job: object) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        await steps.store.submit(make_job(sampling=SAMPLING, **job), limits, "")
    return caught.value


async def used(steps: Steps, name: str, tenant: str = "default") -> float:
    kept = await steps.redis.hget(steps.keys.limit(tenant), name)
    return int(kept or 0) / MINUTE_MS


async def pass_time(steps: Steps, seconds: float, tenant: str = "default") -> None:
    for name in ("requests_ms", "tokens_ms"):
        if await steps.redis.hexists(steps.keys.limit(tenant), name):
            await steps.redis.hincrby(steps.keys.limit(tenant), name, -int(seconds * 1000))


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        (AdmissionLimits(max_queued_jobs_per_tenant=2), "tenant"),
        (AdmissionLimits(max_queued_tokens_per_tenant=8), "tenant_tokens"),
        (AdmissionLimits(max_jobs_per_tenant=2), "tenant_jobs"),
        (AdmissionLimits(requests_per_minute=2), "requests_per_minute"),
        (AdmissionLimits(tokens_per_minute=20), "tokens_per_minute"),
    ],
)
async def test_a_tenants_limit_refuses_before_anything_is_written(
    steps: Steps, limits: AdmissionLimits, scope: str
) -> None:
    for _ in range(2):
        await steps.submit(limits=limits, sampling=SAMPLING)
    before = await steps.redis.hgetall(steps.keys.limit("default"))
    refused = await refusal(steps, limits)
    assert refused.scope == scope
    assert 1.0 <= refused.retry_after_s <= 60.0
    assert await steps.redis.hgetall(steps.keys.limit("default")) == before
    assert (await steps.registry.queue_stats()).queued == 2
    await steps.submit(limits=limits, sampling=SAMPLING, tenant="another")
    await steps.assert_counters_true()
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


@pytest.mark.promise(
    "Access: a tenant's limits hold under concurrency, and unused allowance is returned"
)
@pytest.mark.parametrize(
    "limits",
    [
        AdmissionLimits(max_jobs_per_tenant=5),
        AdmissionLimits(requests_per_minute=5),
        AdmissionLimits(tokens_per_minute=50),
    ],
)
async def test_a_limit_holds_against_everybody_at_once(
    steps: Steps, limits: AdmissionLimits
) -> None:
    jobs = [make_job(sampling=SAMPLING) for _ in range(40)]
    answers = await asyncio.gather(
        *(steps.store.submit(job, limits, "") for job in jobs), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert (len(refused), len(answers) - len(refused)) == (35, 5)


async def test_jobs_count_until_they_have_ended(steps: Steps) -> None:
    limits = AdmissionLimits(max_jobs_per_tenant=2)
    await steps.worker("w1")
    await steps.submit(limits=limits)
    await steps.submit(limits=limits)
    (running, _) = await steps.pull("w1")
    assert (await refusal(steps, limits)).scope == "tenant_jobs"
    await steps.say("w1", Stream(running), [5], "a", end=FINISHED)
    await steps.submit(limits=limits)
    assert (await refusal(steps, limits)).scope == "tenant_jobs"


async def test_an_allowance_fills_up_evenly(steps: Steps) -> None:
    limits = AdmissionLimits(requests_per_minute=6)  # one every ten seconds
    for _ in range(6):
        await steps.submit(limits=limits)
    refused = await refusal(steps, limits)
    assert 1.0 < refused.retry_after_s <= 12.0
    await pass_time(steps, 10)
    await steps.submit(limits=limits)
    assert (await refusal(steps, limits)).scope == "requests_per_minute"
    await pass_time(steps, 3600)  # no more than a minute's allowance is ever saved up
    for _ in range(6):
        await steps.submit(limits=limits)
    assert (await refusal(steps, limits)).scope == "requests_per_minute"


async def test_tokens_that_were_not_needed_are_given_back(steps: Steps) -> None:
    limits = AdmissionLimits(tokens_per_minute=1000)
    await steps.worker("w1")
    ended = await steps.submit(limits=limits, sampling=SAMPLING)
    assert await used(steps, "tokens") == 10
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5, 6], "ab", end=FINISHED)
    assert await used(steps, "tokens") == 5
    assert (await steps.hash(ended.job_id))["reserved"] == "10"


async def test_a_job_that_no_worker_took_used_nothing(steps: Steps) -> None:
    limits = AdmissionLimits(tokens_per_minute=1000, requests_per_minute=100)
    await steps.worker("w1")
    queued = await steps.submit(limits=limits, sampling=SAMPLING)
    await steps.store.cancel(queued.job_id, "cancelled")
    assert (await used(steps, "tokens"), await used(steps, "requests")) == (0, 1)
    running = await steps.submit(limits=limits, sampling=SAMPLING)
    await steps.pull("w1")
    await steps.store.cancel(running.job_id, "cancelled")
    used_tokens = await used(steps, "tokens")
    assert used_tokens == 3  # its prompt may have been read


async def test_every_choice_is_reserved_for(steps: Steps) -> None:
    await steps.submit(
        limits=AdmissionLimits(tokens_per_minute=1000), sampling=SAMPLING, num_choices=4
    )
    assert await used(steps, "tokens") == 3 + 4 * 7


async def test_a_request_larger_than_an_allowance_is_admitted_when_it_is_full(
    steps: Steps,
) -> None:
    limits = AdmissionLimits(tokens_per_minute=4)
    await steps.submit(limits=limits, sampling=SAMPLING)
    refused = await refusal(steps, limits)
    assert refused.retry_after_s == 60.0  # more than two minutes, in truth
    await pass_time(steps, 120)
    assert (await refusal(steps, limits)).scope == "tokens_per_minute"
    await pass_time(steps, 40)
    await steps.submit(limits=limits, sampling=SAMPLING)


async def test_a_repeat_is_not_charged_again(steps: Steps) -> None:
    limits = AdmissionLimits(tokens_per_minute=1000, requests_per_minute=10)
    job = await steps.submit(limits=limits, sampling=SAMPLING)
    await steps.store.submit(job, limits, "")
    assert (await used(steps, "tokens"), await used(steps, "requests")) == (10, 1)


async def test_nothing_is_kept_of_a_tenant_without_limits(steps: Steps) -> None:
    delivery = await steps.running()
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    assert not await steps.redis.exists(steps.keys.limit("default"))


SHARE = AdmissionLimits(
    max_queued_jobs=400, max_queued_tokens=1200, max_queue_share_per_tenant=0.75
)  # prompts have three tokens


async def flood(steps: Steps, tenant: str, limits: AdmissionLimits) -> tuple[int, str]:
    """Submits until one is refused: how many were accepted, and the scope of the refusal."""
    for accepted in range(500):
        try:
            await steps.submit(limits=limits, tenant=tenant)
        except QueueFull as refused:
            return accepted, refused.scope
    raise AssertionError("nothing was refused")


@pytest.mark.promise(
    "Access: a flood delays only its own tenant, and no job starves (with the default limits; "
    "about 20 tenants can flood the queue at once before one without queued jobs is refused)"
)
@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        (replace(SHARE, max_queued_tokens=10**6), "tenant"),
        (replace(SHARE, max_queued_jobs=10**6), "tenant_tokens"),
    ],
)
async def test_tenants_that_flood_the_queue_leave_room_for_one_that_has_nothing_waiting(
    steps: Steps, limits: AdmissionLimits, scope: str
) -> None:
    found = [await flood(steps, f"flooder{number}", limits) for number in range(12)]
    # 3/4 alone; up to the reserved tenth; then a little (1/200) each.
    assert found == [(300, scope), (60, scope), *[(2, scope)] * 10]
    await steps.submit(limits=limits, tenant="another")
    assert await flood(steps, "flooder0", limits) == (0, scope), "its own share is full"
    await steps.assert_counters_true()


async def test_a_queue_that_drains_is_divided_evenly_among_those_that_flood_it(
    steps: Steps,
) -> None:
    limits = AdmissionLimits(max_queued_jobs=20, max_queue_share_per_tenant=0.75)
    await steps.worker("w1")
    waiting = dict.fromkeys("abc", 0)
    for _ in range(60):  # each asks for more than there is, and one job at a time is taken
        for tenant in waiting:
            with suppress(QueueFull):
                await steps.submit(limits=limits, tenant=tenant)
                waiting[tenant] += 1
        (delivery,) = await steps.pull("w1", 1)
        waiting[delivery.job.tenant] -= 1
    assert max(waiting.values()) <= 2 * min(waiting.values()), waiting


async def test_a_full_queue_also_refuses_a_tenant_with_nothing_waiting(
    steps: Steps,
) -> None:
    limits = replace(SHARE, max_queued_jobs=4)
    for number in range(4):
        await steps.submit(limits=limits, tenant=f"t{number}")
    assert (await refusal(steps, limits, tenant="t4")).scope == "total"
    assert (await refusal(steps, limits, tenant="t1")).scope == "tenant"
