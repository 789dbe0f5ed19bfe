"""The Redis restarts, dies, loses its tail or everything, or is away for a while."""

from __future__ import annotations

import pytest

from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until
from tests.support.service_processes import FrontendProcess


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_restart_is_only_a_pause(scenario: Scenario, how: str) -> None:
    clients = scenario.clients(12, 150)
    server = scenario.deployment.server
    async with scenario.middle_of(clients):
        server.stop() if how == "stop" else server.kill()
        server.start()
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_a_lost_tail_is_written_again_by_the_living_workers(scenario: Scenario) -> None:
    clients = scenario.clients(12, 250)
    server = scenario.deployment.server
    async with scenario.middle_of(clients, 100):
        server.kill()
        assert server.cut_tail(30_000) == 30_000
        server.start()
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_a_lost_tail_and_dead_workers_never_give_a_splice(scenario: Scenario) -> None:
    clients = scenario.clients(12, 150)
    server = scenario.deployment.server
    async with scenario.middle_of(clients, 100):
        server.kill()
        for worker in scenario.deployment.workers:
            worker.kill()
    server.cut_tail(20_000)
    server.start()
    await scenario.deployment.use_workers()
    await scenario.all_ended(clients)
    await scenario.settled()


async def test_after_a_flush_every_stream_goes_on(scenario: Scenario) -> None:
    """The worker puts back what it runs, the frontends submit again what waits."""
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=4)
    delivered = scenario.clients(4, 300)
    async with scenario.middle_of(delivered):
        untouched = scenario.clients(4, 20)
        await scenario.num_queued(4)
        await scenario.redis.flushall()
    scenario.oracle.begin_at_zero()
    await scenario.all_finished([*delivered, *untouched])
    await scenario.deployment.ready()
    later = scenario.clients(2, 20)
    await scenario.all_finished(later)
    await scenario.settled()


async def test_everybody_waits_for_a_redis_that_is_not_there_yet(scenario: Scenario) -> None:
    deployment = scenario.deployment
    await deployment.leave()
    deployment.server.stop()
    workers = [deployment.start_worker() for _ in range(2)]
    frontends = [deployment.start_frontend() for _ in range(2)]
    for worker in workers:
        await until(lambda w=worker: "waiting for Redis" in w.log, "a worker to wait")
    for frontend in frontends:
        await until(lambda f=frontend: _status(f, "/health", 200), "a frontend to live")
        assert await frontend.status("/ready") == 503
    deployment.server.start()
    await deployment.ready()
    await scenario.all_finished(scenario.clients(4, 20))
    await scenario.settled()


async def _status(frontend: FrontendProcess, path: str, status: int) -> bool:
    return await frontend.status(path) == status


async def test_streams_stay_open_while_redis_is_away_and_engines_pause(scenario: Scenario) -> None:
    clients = scenario.clients(6, 250)
    server = scenario.deployment.server
    async with scenario.middle_of(clients):
        owners = {await scenario.worker_of(client.reading.job_id) for client in clients}
        num_pauses = {worker: worker.log.count("the engine pauses") for worker in owners}
        seen = [client.reading.num_keepalives for client in clients]
        server.stop()
    for worker, before in num_pauses.items():
        await until(
            lambda w=worker, n=before: w.log.count("the engine pauses") > n, "the engine to pause"
        )
    for client, before in zip(clients, seen, strict=True):
        await until(lambda c=client, b=before: c.reading.num_keepalives > b + 11, "keep-alives")
    server.start()
    await scenario.all_finished(clients)
    for worker in owners:
        await until(lambda w=worker: "the engine continues" in w.log, "the engine to continue")
    for client in clients:  # all leases ended meanwhile, and nobody was taken for dead
        assert (await scenario.job(client.reading.job_id))["attempt"] == "1"
    await scenario.settled()


async def test_a_full_redis_refuses_new_work_and_lets_running_work_end(scenario: Scenario) -> None:
    running = scenario.clients(6, 200)
    async with scenario.middle_of(running):
        used = int((await scenario.redis.info("memory"))["used_memory"])
        await scenario.redis.config_set("maxmemory", max(1, used // 2))
        refused = scenario.client(10)
        reading = await refused.ended()
        assert reading.status == 503, reading.status
    await scenario.all_finished(running)
    await scenario.redis.config_set("maxmemory", 0)
    await scenario.all_finished(scenario.clients(2, 20))
    await scenario.settled()
