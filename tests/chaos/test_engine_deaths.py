"""The engine process dies, hangs, or is killed by what it was given."""

from __future__ import annotations

from shared.messages import JobState
from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.scenario import Scenario
from tests.support.faults.sitecustomize import CRASHER_TOKEN, POISON_TOKEN
from tests.support.polling import until


async def test_streams_of_a_killed_engine_go_on(scenario: Scenario) -> None:
    clients = scenario.clients(8, 120)
    async with scenario.middle_of(clients):
        for worker in scenario.deployment.workers:
            worker.kill_engine()
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_a_hanging_engine_is_replaced_and_its_jobs_move(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(STALL_LIMIT_S=2)
    clients = scenario.clients(8, 120)
    async with scenario.middle_of(clients):
        worker = await scenario.worker_of(clients[0].reading.job_id)
        hanging = worker.engine_pid()
        worker.freeze_engine()
        killed = f"made no progress and was killed engine_pid={hanging}"
        await until(lambda: killed in worker.log, "it")
    await scenario.all_finished(clients)
    await until(lambda: worker.engine_pid() != hanging, "another engine")
    jobs = [await scenario.job(client.reading.job_id) for client in clients]
    assert {job.get("stalls") for job in jobs} <= {None, "1"}
    assert any("stalls" in job for job in jobs)
    await scenario.settled()


async def test_a_poison_job_is_dead_lettered_and_its_neighbours_finish(scenario: Scenario) -> None:
    letters = await scenario.redis.xlen(scenario.transport.keys.dead_letters)
    deaths_before = _engine_deaths(scenario)
    innocents = scenario.clients(15, 150)
    async with scenario.middle_of(innocents):
        poison = scenario.client(20, prompt=[POISON_TOKEN, *random_prompt(scenario.rng)])
        (reading,) = await scenario.all_ended([poison])
    await scenario.all_finished(innocents)
    assert (reading.error_code, reading.num_tokens) == ("poison", 0)
    assert await scenario.redis.xlen(scenario.transport.keys.dead_letters) == letters + 1
    assert _engine_deaths(scenario) - deaths_before <= 4
    await scenario.settled()


def _engine_deaths(scenario: Scenario) -> int:
    return sum(w.log.count("the engine process died") for w in scenario.deployment.workers)


async def test_a_job_that_crashes_after_some_tokens_again_and_again_is_ended(
    scenario: Scenario,
) -> None:
    """Its progress clears it of suspicion each time; the cap over its whole life ends it."""
    prompt = [CRASHER_TOKEN, *random_prompt(scenario.rng)]
    # Engines that die often come back slowly: one of many workers has always one at hand.
    await scenario.deployment.use_workers(6)
    client = scenario.client(100, prompt=prompt)
    (reading,) = await scenario.all_ended([client])
    assert reading.error_code in ("engine_died", "worker_lost")
    assert reading.num_tokens > 0
    assert (await scenario.job(reading.job_id))["deaths"] == "10"
    assert (await scenario.job(reading.job_id))["state"] == JobState.FAILED
    await scenario.settled()
