"""What a refused caller gets, and who is refused before it waits in vain."""

from __future__ import annotations

import pytest

from shared.messages import SamplingParams
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from tests.support.jobs import LIMITS, Stream, make_job
from tests.support.transport_steps import FINISHED, Steps


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def measure(steps: Steps, tokens_per_s: float, model: str = "org/tiny:1") -> None:
    """As a frontend does all the time, while work waits."""
    clock = Clock()
    steps.registry._clock = clock
    worker = f"measured-{model}"
    for second in range(4):
        clock.now_s += 1.0
        stats = {"prompt_tokens": second * tokens_per_s / 2, "generated_tokens": 0.0}
        stats["generated_tokens"] = stats["prompt_tokens"]
        await steps.worker(worker, models=(model,), stats=stats)
        await steps.registry.workers()
        await steps.registry.queue_stats()


def large(**more: object) -> dict[str, object]:
    """A job that is expected to take 1000 tokens where nobody has ended yet."""
    return {
        "prompt_token_ids": (1,) * 900,
        "sampling": SamplingParams(max_tokens=100, seed=1),
    } | more


async def refusal(steps: Steps, limits: AdmissionLimits = LIMITS, **job: object) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        await steps.store.submit(make_job(**job), limits, "")
    return caught.value


@pytest.mark.promise(
    "Access: `Retry-After` is measured, and a request that would wait in vain is refused at once"
)
async def test_the_wait_is_the_waiting_work_over_what_the_workers_do(
    steps: Steps,
) -> None:
    limits = AdmissionLimits(max_queued_jobs=3)
    for number in range(3):
        await steps.submit(limits=limits, tenant=f"t{number}", **large())
    unknown = await refusal(steps, limits, **large())
    assert 2.0 <= unknown.retry_after_s <= 2.4
    await measure(steps, tokens_per_s=200)
    known = await refusal(steps, limits, **large())
    assert 20.0 <= known.retry_after_s <= 24.0  # 4000 tokens, its own among them


async def test_who_would_wait_past_its_deadline_is_refused_at_once(
    steps: Steps,
) -> None:
    for number in range(5):
        await steps.submit(tenant=f"t{number}", **large())
    patient = {"timeout_ms": 31_000, "tenant": "new"}
    await measure(steps, tokens_per_s=200)
    early = await refusal(steps, **large(timeout_ms=29_000, tenant="new"))
    assert early.scope == "deadline"
    assert 30.0 <= early.retry_after_s <= 36.0
    await steps.submit(**large(**patient))
    await steps.assert_counters_true()


async def test_only_what_goes_before_counts(steps: Steps) -> None:
    """A flood in the lanes behind, and another model's queue, keep nobody out."""
    for _ in range(20):
        await steps.submit(tenant="flood", **large())
    for number in range(20):
        await steps.submit(tenant=f"t{number}", model="other", **large())
    await measure(steps, tokens_per_s=200)
    await steps.submit(**large(timeout_ms=15_000, tenant="new"))
    assert (await refusal(steps, **large(timeout_ms=15_000, tenant="flood"))).scope == "deadline"


async def test_no_request_is_refused_for_an_unknown_rate(steps: Steps) -> None:
    for _ in range(5):
        await steps.submit(**large())
    await steps.submit(**large(timeout_ms=1))
    await measure(steps, tokens_per_s=0)  # a worker may come and do it all
    await steps.submit(**large(timeout_ms=1))


async def test_the_output_that_is_expected_is_what_jobs_really_gave(
    steps: Steps,
) -> None:
    greedy = SamplingParams(max_tokens=5000, seed=1)
    assert (await steps.hash((await steps.submit(sampling=greedy)).job_id))["work"] == "259"
    await steps.worker("w1")
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5] * 10, "a" * 10, end=FINISHED)
    one = await steps.submit(sampling=greedy)
    assert (await steps.hash(one.job_id))["work"] == "13"
    three = await steps.submit(sampling=greedy, num_choices=3)
    assert (await steps.hash(three.job_id))["work"] == "33"
