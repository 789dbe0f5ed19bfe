"""What is left of a tenant's allowances: each submit and each refusal tells it."""

from __future__ import annotations

import pytest

from shared.messages import SamplingParams
from shared.transport.ports.admission import AdmissionLimits, QueueFull, Submission
from shared.transport.ports.jobs import Allowance, Submitted
from tests.support.jobs import Stream, make_job
from tests.support.transport_steps import FINISHED, Steps

SAMPLING = SamplingParams(max_tokens=7, seed=7)  # with its prompt of three: ten tokens
LIMITS = AdmissionLimits(requests_per_minute=3, tokens_per_minute=100)


async def submit(steps: Steps, limits: AdmissionLimits, **job: object) -> Submission:
    return await steps.store.submit(make_job(sampling=SAMPLING, **job), limits, "")


async def refusal(steps: Steps, limits: AdmissionLimits, **job: object) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        await submit(steps, limits, **job)
    return caught.value


async def pass_ms(steps: Steps, name: str, ms: int) -> None:
    await steps.redis.hincrby(steps.keys.limit("default"), f"{name}_ms", -ms)


@pytest.mark.promise(
    "Access: a tenant with limits gets the rest in response headers, in its dialect (as of the "
    "admission; none for rows of a batch)"
)
async def test_the_remaining_limits_are_those_after_the_charge(steps: Steps) -> None:
    result = await submit(steps, LIMITS)
    assert result == Submission(
        Submitted.ACCEPTED,
        (Allowance("requests", 3, 2, 20_000), Allowance("tokens", 100, 90, 6_000)),
    )
    for left in (1, 0):
        requests, tokens = (await submit(steps, LIMITS)).allowances
        assert requests.remaining == left
        assert 20_000 * (2 - left) < requests.full_in_ms <= 20_000 * (3 - left)
        assert 100 - 10 * (3 - left) <= tokens.remaining <= 90


async def test_a_refusal_tells_how_long_the_next_one_has_to_wait(steps: Steps) -> None:
    limits = AdmissionLimits(requests_per_minute=1)
    await submit(steps, limits)
    before = await steps.redis.hgetall(steps.keys.limit("default"))
    (left,) = (await refusal(steps, limits)).allowances
    assert (left.name, left.per_minute, left.remaining) == ("requests", 1, 0)
    assert 30_000 < left.full_in_ms <= 60_000
    assert await steps.redis.hgetall(steps.keys.limit("default")) == before
    await pass_ms(steps, "requests", left.full_in_ms - 20_000)
    (nearly,) = (await refusal(steps, limits)).allowances
    assert nearly.full_in_ms <= 20_000
    await pass_ms(steps, "requests", nearly.full_in_ms)
    assert (await submit(steps, limits)).outcome is Submitted.ACCEPTED


async def test_a_refusal_for_another_reason_tells_them_too(steps: Steps) -> None:
    limits = AdmissionLimits(max_jobs_per_tenant=1, requests_per_minute=3)
    await submit(steps, limits)
    refused = await refusal(steps, limits)
    assert refused.scope == "tenant_jobs"
    assert [left.remaining for left in refused.allowances] == [2]


async def test_a_repeat_gets_the_remaining_limits_and_is_charged_nothing(
    steps: Steps,
) -> None:
    job = await steps.submit(limits=LIMITS, sampling=SAMPLING)
    before = await steps.redis.hgetall(steps.keys.limit("default"))
    again = await steps.store.submit(job, LIMITS, "")
    assert again.outcome is Submitted.DUPLICATE
    requests, tokens = again.allowances
    assert (requests.remaining, requests.per_minute) == (2, 3)
    assert 90 <= tokens.remaining <= 100
    assert await steps.redis.hgetall(steps.keys.limit("default")) == before


async def test_what_a_job_did_not_take_is_left_again(steps: Steps) -> None:
    limits = AdmissionLimits(tokens_per_minute=100)
    await steps.worker("w1")
    await steps.submit(limits=limits, sampling=SamplingParams(max_tokens=87, seed=7))
    (left,) = (await refusal(steps, limits, prompt_token_ids=(1,) * 60)).allowances
    assert 10 <= left.remaining < 67
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5, 6], "ab", end=FINISHED)
    (left,) = (await submit(steps, limits)).allowances
    assert 85 <= left.remaining <= 90


async def test_a_request_larger_than_an_allowance_uses_all_of_it(
    steps: Steps,
) -> None:
    (left,) = (await submit(steps, AdmissionLimits(tokens_per_minute=4))).allowances
    assert left == Allowance("tokens", 4, 0, 150_000)


async def test_without_limits_there_are_no_rate_limit_headers(steps: Steps) -> None:
    assert await submit(steps, AdmissionLimits()) == Submission(Submitted.ACCEPTED)
    assert (await refusal(steps, AdmissionLimits(max_queued_jobs=1))).allowances == ()
