"""Workers are stopped by a signal: what they run goes on, and nobody sees it."""

from __future__ import annotations

from tests.chaos.harness.scenario import Scenario


async def test_a_stopping_worker_hands_its_jobs_on_without_blame(scenario: Scenario) -> None:
    clients = scenario.clients(12, 150)
    async with scenario.middle_of(clients):
        leaving = await scenario.worker_of(clients[0].reading.job_id)
        leaving.terminate()
        assert await leaving.ended() == 0
    await scenario.all_finished(clients)
    for client in clients:
        assert (await scenario.job(client.reading.job_id))["crashes"] == "0"
    assert (await scenario.job(clients[0].reading.job_id))["attempt"] == "2"
    await scenario.settled()


async def test_a_rolling_restart_of_all_workers_fails_nothing(scenario: Scenario) -> None:
    clients = scenario.clients(12, 150)
    async with scenario.middle_of(clients):
        for old in list(scenario.deployment.workers):
            await scenario.deployment.start_worker().ready()
            old.terminate()
            assert await old.ended() == 0
    await scenario.all_finished(clients)
    for client in clients:
        assert (await scenario.job(client.reading.job_id))["crashes"] == "0"
    await scenario.settled()


async def test_clocks_an_hour_wrong_change_nothing(scenario: Scenario) -> None:
    deployment = scenario.deployment
    await deployment.use_workers(1, CHAOS_CLOCK_OFFSET_S=3600)
    deployment.start_worker(CHAOS_CLOCK_OFFSET_S=-3600)
    await deployment.use_frontends(1, CHAOS_CLOCK_OFFSET_S=-3600)
    deployment.start_frontend(CHAOS_CLOCK_OFFSET_S=3600)
    await deployment.ready()
    clients = scenario.clients(8, 120)
    async with scenario.middle_of(clients):
        deployment.workers[0].kill()
    await scenario.all_finished(clients)
    await scenario.settled()
