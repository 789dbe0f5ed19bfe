"""The engine process dies, hangs, or is killed by what it was given."""

from __future__ import annotations

from shared.messages import JobState
from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.polling import until
from tests.chaos.harness.stage import Stage
from tests.support.faults.sitecustomize import CRASHER_TOKEN, POISON_TOKEN


async def test_streams_of_a_killed_engine_go_on(stage: Stage) -> None:
    clients = stage.clients(8, 120)
    async with stage.middle_of(clients):
        for worker in stage.deployment.workers:
            worker.kill_engine()
    await stage.all_finished(clients)
    await stage.settled()


async def test_a_hanging_engine_is_replaced_and_its_jobs_move(stage: Stage) -> None:
    await stage.deployment.use_workers(STALL_LIMIT_S=2)
    clients = stage.clients(8, 120)
    async with stage.middle_of(clients):
        worker = await stage.worker_of(clients[0].reading.job_id)
        hanging = worker.engine_pid()
        worker.freeze_engine()
        await until(lambda: f"makes no progress and is killed pid={hanging}" in worker.log, "it")
    await stage.all_finished(clients)
    await until(lambda: worker.engine_pid() != hanging, "another engine")
    await stage.settled()


async def test_a_poison_job_is_dead_lettered_and_its_neighbours_finish(stage: Stage) -> None:
    letters = await stage.redis.xlen(stage.transport.keys.dead_letters)
    deaths_before = _engine_deaths(stage)
    innocents = stage.clients(15, 150)
    async with stage.middle_of(innocents):
        poison = stage.client(20, prompt=[POISON_TOKEN, *random_prompt(stage.rng)])
        (reading,) = await stage.all_ended([poison])
    await stage.all_finished(innocents)
    assert (reading.error_code, reading.num_tokens) == ("poison", 0)
    assert await stage.redis.xlen(stage.transport.keys.dead_letters) == letters + 1
    assert _engine_deaths(stage) - deaths_before <= 4
    await stage.settled()


def _engine_deaths(stage: Stage) -> int:
    return sum(w.log.count("the engine process died") for w in stage.deployment.workers)


async def test_a_job_that_crashes_after_some_tokens_again_and_again_is_ended(stage: Stage) -> None:
    """Its progress clears it of suspicion each time; the cap over its whole life ends it."""
    prompt = [CRASHER_TOKEN, *random_prompt(stage.rng)]
    # Engines that die often come back slowly: one of many workers has always one at hand.
    await stage.deployment.use_workers(6)
    client = stage.client(100, prompt=prompt)
    (reading,) = await stage.all_ended([client])
    assert reading.error_code in ("engine_died", "worker_lost")
    assert reading.num_tokens > 0
    assert (await stage.job(reading.job_id))["deaths"] == "10"
    assert (await stage.job(reading.job_id))["state"] == JobState.FAILED
    await stage.settled()
