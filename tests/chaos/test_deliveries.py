"""Jobs are delivered twice, half, by dead hands, from newer releases, or too many at once."""

from __future__ import annotations

import httpx

from shared.keys import GROUP
from shared.messages import JobState
from shared.transport.ports.queue import AppendStatus, Delivery
from tests.chaos.harness.scenario import Scenario
from tests.support.jobs import Stream
from tests.support.polling import until
from tests.support.transport_steps import Steps

PROMPT = list(range(60, 80))


async def _no_workers(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(0)


async def _phantom(scenario: Scenario, name: str = "phantom") -> Steps:
    """A worker without a process. It sends no more heartbeats: its lease outlasts any scenario."""
    steps = Steps(scenario.transport)
    await steps.worker(name, (scenario.deployment.model,), lease_ms=120_000)
    return steps


async def _pulled(steps: Steps, count: int, name: str = "phantom") -> list[Delivery]:
    return [*await until(lambda: steps.pull(name, count), "a delivery")]


async def _say(
    scenario: Scenario, steps: Steps, stream: Stream, num_tokens: int, name: str = "phantom"
) -> AppendStatus:
    """The echo's next tokens, from where the stream stands; the job does not end."""
    every = scenario.echo.of(PROMPT, stream.cursor.num_tokens + num_tokens)
    text = every.text.encode()[stream.cursor.num_bytes :].decode()
    said = every.token_ids[stream.cursor.num_tokens :]
    return (await steps.say(name, stream, said, text)).status


async def test_a_job_delivered_to_a_worker_that_died_before_its_claim_runs(
    scenario: Scenario,
) -> None:
    await _no_workers(scenario)
    phantom = await _phantom(scenario)
    job_id = await scenario.submit(PROMPT, 30)
    queue = scenario.transport.keys.queue(scenario.deployment.model, 0)
    ((_, entries),) = await scenario.redis.xreadgroup(GROUP, "phantom", {queue: ">"}, count=100)
    assert len(entries) == 1
    await phantom.die("phantom")
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
    (delivery,) = await _pulled(phantom, 1)
    assert await _say(scenario, phantom, Stream(delivery), 30) is AppendStatus.OK
    await phantom.die("phantom")
    workers = await scenario.deployment.use_workers()
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 30)])
    assert any("resumed_tokens=30" in worker.log for worker in workers)
    statuses = await scenario.transport.registry.workers()
    assert all(status.stats["generated_tokens"] == 0 for status in statuses)
    await scenario.settled()


async def test_a_second_delivery_fences_the_first(scenario: Scenario) -> None:
    await _no_workers(scenario)
    steps = await _phantom(scenario, "first")
    await _phantom(scenario, "second")
    job_id = await scenario.submit(PROMPT, 30)
    held = Stream((await _pulled(steps, 1, "first"))[0])
    assert await _say(scenario, steps, held, 5, "first") is AppendStatus.OK
    queue = scenario.transport.keys.queue(scenario.deployment.model, 0)
    entry = (await scenario.job(job_id))["qid"]
    await scenario.redis.xclaim(queue, GROUP, "second", 0, [entry])
    (again,) = await scenario.transport.queue.reconcile("second", frozenset())
    assert (again.attempt, len(again.output_token_ids)) == (2, 5)
    assert await _say(scenario, steps, held, 5, "first") is AppendStatus.FENCED
    assert await _say(scenario, steps, Stream(again), 5, "second") is AppendStatus.OK
    await steps.die("first")
    await steps.die("second")
    await scenario.deployment.use_workers()
    await scenario.all_finished([scenario.reader_of(job_id, PROMPT, 30)])
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

    await scenario.all_are([job_id], attempt="1")
    only.kill()
    scenario.deployment.throttle.release()
    (reading,) = await scenario.all_ended([reader])
    # The latter for a reader whom no token has reached yet.
    assert reading.error_code in ("deadline_exceeded", "queue_timeout")
    job = await scenario.job(job_id)
    assert (job["state"], job["reason"]) == (JobState.EXPIRED, "deadline_exceeded")
    await scenario.deployment.use_workers()
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


async def test_a_cancel_reaches_queued_and_running_jobs_over_http(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=1)
    running = scenario.client(400)
    async with scenario.middle_of([running]):
        waiting = scenario.client(20)
        await scenario.num_queued(1)
        await until(lambda: waiting.reading.job_id, "its name")
        for client in (waiting, running):
            answer = await _cancel(scenario, client.reading.job_id)
            assert answer["status"] == "cancelled"
    readings = await scenario.all_ended([running, waiting])
    assert {reading.error_code for reading in readings} == {"cancelled"}
    assert (await scenario.job(waiting.reading.job_id))["attempt"] == "0"
    await scenario.settled()


async def _cancel(scenario: Scenario, job_id: str) -> dict[str, str]:
    async with httpx.AsyncClient() as http:
        answer = await http.delete(f"{scenario.deployment.urls()[1]}/v1/jobs/{job_id}")
        assert answer.status_code == 200
        payload: dict[str, str] = answer.json()
        return payload
