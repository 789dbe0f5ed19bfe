"""Jobs are delivered twice, half, by dead hands, from newer releases, or too many at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from shared.keys import GROUP, new_job_id
from shared.messages import Job, JobState, OnDisconnect, SamplingParams
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from shared.transport.ports.queue import AppendStatus
from tests.chaos.harness.phantom import Phantom
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

PROMPT = list(range(60, 80))
NUM_WINS = 4  # of cancels and of ends, in each of a dozen series of races


async def _no_workers(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(0)


async def _phantom(scenario: Scenario, name: str = "phantom") -> Phantom:
    deployment = scenario.deployment
    return await Phantom(scenario.transport, deployment.model, deployment.checkpoint, name).begin()


async def test_a_job_delivered_to_a_worker_that_died_before_its_claim_runs(
    scenario: Scenario,
) -> None:
    await _no_workers(scenario)
    phantom = await _phantom(scenario)
    job_id = await scenario.submit(PROMPT, 30)
    assert await phantom.deliver_only() == 1
    await phantom.die()
    await scenario.deployment.use_workers()
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 30)])
    job = await scenario.job(job_id)
    assert (job["attempt"], int(job["crashes"]) <= 1) == ("1", True)
    await scenario.settled()


async def test_a_worker_that_died_before_its_last_word_leaves_nothing_to_compute(
    scenario: Scenario,
) -> None:
    await _no_workers(scenario)
    phantom = await _phantom(scenario)
    job_id = await scenario.submit(PROMPT, 30)
    (delivery,) = await phantom.pull(1)
    assert (await phantom.say(delivery, 30)).status is AppendStatus.OK
    await phantom.die()
    workers = await scenario.deployment.use_workers()
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 30)])
    assert any("resumed_tokens=30" in worker.log for worker in workers)
    statuses = await scenario.transport.registry.workers()
    assert all(status.stats["generated_tokens"] == 0 for status in statuses)
    await scenario.settled()


async def test_a_second_delivery_fences_the_first(scenario: Scenario) -> None:
    await _no_workers(scenario)
    first, second = await _phantom(scenario, "phantom1"), await _phantom(scenario, "phantom2")
    job_id = await scenario.submit(PROMPT, 30)
    (held,) = await first.pull(1)
    assert (await first.say(held, 5)).status is AppendStatus.OK
    queue = scenario.transport.keys.queue(scenario.deployment.model, 0)
    entry = (await scenario.job(job_id))["qid"]
    await scenario.redis.xclaim(queue, GROUP, second.worker_id, 0, [entry])
    (again,) = await scenario.transport.queue.reconcile(second.worker_id, frozenset())
    assert (again.attempt, len(again.output_token_ids)) == (2, 5)
    assert (await first.say(held, 5)).status is AppendStatus.FENCED
    assert (await second.say(again, 5)).status is AppendStatus.OK
    await first.die()
    await second.die()
    await scenario.deployment.use_workers()
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 30)])
    await scenario.settled()


async def test_a_worker_that_dies_with_150_jobs_leaves_none_behind(scenario: Scenario) -> None:
    await _no_workers(scenario)
    phantom = await _phantom(scenario)
    prompts = [[60 + i % 40, *PROMPT] for i in range(150)]
    job_ids = [await scenario.submit(prompt, 12) for prompt in prompts]
    held: list[str] = []
    while len(held) < 150:
        held += [delivery.job.job_id for delivery in await phantom.pull(150)]
    await phantom.die()
    await scenario.deployment.use_workers(ECHO_STEP_MS=1, MAX_NUM_SEQS=32)
    readers = [
        scenario.reader_of(job_id, prompt, 12)
        for job_id, prompt in zip(job_ids, prompts, strict=True)
    ]
    await scenario.all_finished(readers)
    await scenario.settled()


async def test_the_only_worker_dies_and_a_later_one_goes_on(scenario: Scenario) -> None:
    (only,) = await scenario.deployment.use_workers(1)
    clients = scenario.clients(4, 100)
    async with scenario.middle_of(clients):
        only.kill()
    seen = [client.reading.num_keepalives for client in clients]
    for client, before in zip(clients, seen, strict=True):
        await until(lambda c=client, b=before: c.reading.num_keepalives > b + 3, "keep-alives")
    await scenario.deployment.use_workers()
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_without_any_worker_a_job_expires_at_its_deadline(scenario: Scenario) -> None:
    (only,) = await scenario.deployment.use_workers(1)
    scenario.deployment.throttle.apply(5)
    job_id = await scenario.submit(PROMPT, 400, timeout_ms=2500)
    reader = scenario.reader_of(job_id, PROMPT, 400)

    async def is_begun() -> bool:
        return (await scenario.job(job_id))["attempt"] == "1"

    await until(is_begun, "the job to be claimed")
    only.kill()
    scenario.deployment.throttle.release()
    (reading,) = await scenario.all_ended([reader])
    # The latter for a reader whom no token has reached yet.
    assert reading.error_code in ("deadline_exceeded", "queue_timeout")
    job = await scenario.job(job_id)
    assert (job["state"], job["reason"]) == (JobState.EXPIRED, "deadline_exceeded")
    await scenario.deployment.use_workers()
    await scenario.settled()


async def test_without_any_worker_only_what_was_never_begun_waits_in_vain(
    scenario: Scenario,
) -> None:
    (only,) = await scenario.deployment.use_workers(1)
    scenario.deployment.throttle.apply(5)
    begun = await scenario.submit(PROMPT, 100, queue_timeout_ms=120_000)
    first = scenario.reader_of(begun, PROMPT, 100)

    async def is_begun() -> bool:
        return (await scenario.job(begun))["attempt"] == "1"

    await until(is_begun, "the job to be claimed")
    only.kill()
    scenario.deployment.throttle.release()
    await scenario.redis.hset(scenario.transport.keys.job(begun), "queue_deadline_ms", 1)
    late = await scenario.submit(PROMPT, 100, queue_timeout_ms=500)
    (reading,) = await scenario.all_ended([scenario.reader_of(late, PROMPT, 100)])
    assert reading.error_code == "queue_timeout"
    assert (await scenario.job(late))["state"] == JobState.EXPIRED
    await scenario.deployment.use_workers()
    await scenario.all_finished([first])
    await scenario.settled()


async def test_a_job_of_a_newer_release_waits_for_a_newer_worker(scenario: Scenario) -> None:
    await _no_workers(scenario)
    job_id = await scenario.submit(PROMPT, 20)
    key = scenario.transport.keys.job(job_id)
    await scenario.redis.hset(key, "v", 2)
    await scenario.deployment.use_workers()
    await scenario.all_finished(scenario.clients(4, 20))
    assert (await scenario.job(job_id))["state"] == JobState.QUEUED
    # A worker that understands it comes: here, the job is one that today's workers understand.
    await scenario.redis.hset(key, "v", 1)
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 20)])
    await scenario.settled()


async def test_a_tenants_flood_is_refused_beyond_its_cap_and_others_get_in(
    scenario: Scenario,
) -> None:
    scenario.deployment.throttle.apply(1)  # the workers do not eat up what comes in meanwhile
    limits = AdmissionLimits(max_queued_jobs_per_tenant=40)
    refused: list[tuple[str, float]] = []

    async def submit(tenant: str) -> str | None:
        job = Job(
            job_id=new_job_id(),
            model=scenario.deployment.model,
            prompt_token_ids=tuple(PROMPT),
            sampling=SamplingParams(max_tokens=20, seed=1),
            kind="generate",
            tenant=tenant,
            on_disconnect=OnDisconnect.CONTINUE,
        )
        try:
            await scenario.transport.store.submit(job, limits, "")
        except QueueFull as full:
            refused.append((full.scope, full.retry_after_s))
            return None
        return job.job_id

    flood = await asyncio.gather(*(submit("flood") for _ in range(300)))
    light = [await submit(f"light{i}") for i in range(5)]
    assert len(refused) >= 150
    assert {scope for scope, _ in refused} == {"tenant"}
    assert all(0 < retry_after_s <= 120 for _, retry_after_s in refused)
    assert all(light)
    scenario.deployment.throttle.release()
    job_ids = [job_id for job_id in (*flood, *light) if job_id]
    readers = [scenario.reader_of(job_id, PROMPT, 20) for job_id in job_ids]
    await scenario.all_finished(readers)
    await scenario.settled()


async def test_a_cancel_that_races_the_end_answers_what_was_latched(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(2, ECHO_STEP_MS=1)
    store = scenario.transport.store

    async def race(max_tokens: int, delay_s: float) -> JobState:
        job_id = await scenario.submit(PROMPT, max_tokens)
        await asyncio.sleep(delay_s)
        answers = await asyncio.gather(*(store.cancel(job_id, "cancelled") for _ in range(2)))
        states = {answer.state for answer in answers if answer is not None}
        assert len(states) == 1
        assert sum(answer.won for answer in answers if answer is not None) <= 1
        (state,) = states
        record = await store.get(job_id)
        assert record is not None
        assert record.state is state
        return state

    async def many_races(number: int) -> Counter[JobState]:
        """Whoever won the last one has it harder in the next: so they stay close."""
        outcomes: Counter[JobState] = Counter()
        delay_s = 0.02
        while min(outcomes[JobState.FINISHED], outcomes[JobState.CANCELLED]) < NUM_WINS:
            outcomes[state := await race(1 + number, delay_s)] += 1
            delay_s *= 1.5 if state is JobState.CANCELLED else 0.5
        return outcomes

    for outcomes in await asyncio.gather(*(many_races(number) for number in range(12))):
        assert set(outcomes) == {JobState.FINISHED, JobState.CANCELLED}
    await scenario.settled()


async def test_a_cancel_reaches_queued_and_running_jobs_over_http(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=1)
    running = scenario.client(400)
    async with scenario.middle_of([running]):
        waiting = scenario.client(20)
        await until(lambda: _num_queued(scenario, 1), "a job to wait")
        await until(lambda: waiting.reading.job_id, "its name")
        for client in (waiting, running):
            answer = await _cancel(scenario, client.reading.job_id)
            assert answer["status"] == "cancelled"
    readings = await scenario.all_ended([running, waiting])
    assert {reading.error_code for reading in readings} == {"cancelled"}
    assert (await scenario.job(waiting.reading.job_id))["attempt"] == "0"
    await scenario.settled()


async def _num_queued(scenario: Scenario, number: int) -> bool:
    return (await scenario.transport.registry.queue_stats()).queued == number


async def _cancel(scenario: Scenario, job_id: str) -> dict[str, str]:
    async with httpx.AsyncClient() as http:
        answer = await http.delete(f"{scenario.deployment.urls()[1]}/v1/jobs/{job_id}")
        assert answer.status_code == 200
        payload: dict[str, str] = answer.json()
        return payload
