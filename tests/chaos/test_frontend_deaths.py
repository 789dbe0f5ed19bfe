"""A frontend dies or leaves: its readers go on elsewhere, or their jobs end."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

STANDSTILL_S = 9.0  # beyond a lease: more than the readers of a dead frontend have


async def test_readers_of_a_killed_frontend_go_on_at_another(scenario: Scenario) -> None:
    clients = scenario.clients(12, 120, resumes=True)
    async with scenario.middle_of(clients):
        scenario.deployment.frontends[0].kill()
    await scenario.all_finished(clients)
    assert any(client.reading.num_connections > 1 for client in clients)
    await scenario.settled()


@pytest.mark.parametrize("num_frontends", [1, 2])
async def test_the_streams_of_a_frontend_that_stood_still_go_on(
    scenario: Scenario, num_frontends: int
) -> None:
    """Its lease has ended long since: workers and the other frontend look for orphans meanwhile."""
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=4)
    frozen = (await scenario.deployment.use_frontends(num_frontends, FRONTEND_LEASE_MS=2000))[0]
    running = [scenario.client(200, first_url=0) for _ in range(4)]
    async with scenario.middle_of(running):
        queued = [scenario.client(20, first_url=0) for _ in range(3)]
        await scenario.num_queued(3)
        job_ids = await scenario.live_ids()
        frontend_id, _, _ = (await scenario.job(job_ids[0]))["fe"].partition("#")
        lease = scenario.transport.keys.frontend(frontend_id)
        frozen.freeze()

        async def has_ended() -> bool:
            return not await scenario.redis.exists(lease)

        await until(has_ended, "its lease to end")
        await asyncio.sleep(STANDSTILL_S)
        assert [(await scenario.job(job_id)).get("reason") for job_id in job_ids] == [None] * 7
        frozen.thaw()
    await scenario.all_finished([*running, *queued])
    await scenario.settled()


async def test_jobs_of_a_frontend_that_stands_still_for_too_long_are_orphaned(
    scenario: Scenario,
) -> None:
    """Its connections stay open, as those of a machine that lost its network."""
    victim, _ = await scenario.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    running = [scenario.client(450, first_url=0) for _ in range(2)]
    async with scenario.middle_of(running):
        job_ids = await scenario.live_ids()
        victim.freeze()
        await scenario.all_are(job_ids, state="cancelled", reason="orphaned")
        victim.thaw()
    for reading in await scenario.all_ended(running):
        assert reading.error_code == "orphaned"
    await scenario.settled()


async def test_jobs_with_a_grace_period_outlive_their_frontend_for_a_returning_reader(
    scenario: Scenario,
) -> None:
    clients = scenario.clients(6, 150, resumes=True, on_disconnect="grace")
    async with scenario.middle_of(clients):
        scenario.deployment.frontends[0].kill()
        for client in clients[::2]:
            await until(lambda c=client: c.reading.num_connections > 1, "a reader to return")
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_jobs_of_a_dead_frontend_are_orphaned_and_queued_ones_never_run(
    scenario: Scenario,
) -> None:
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=2)
    await scenario.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    victim = scenario.deployment.frontends[0]
    running = [scenario.client(450, first_url=0) for _ in range(2)]
    async with scenario.middle_of(running):
        queued = [scenario.client(20, first_url=0) for _ in range(3)]
        await scenario.num_queued(3)
        job_ids = await scenario.live_ids()
        victim.kill()
        await scenario.all_are(job_ids, state="cancelled", reason="orphaned")
    for client in (*running, *queued):
        await client.ended()
        assert not client.reading.has_ended
    started = [client.reading.job_id for client in running]
    for job_id in set(job_ids) - set(started):
        assert (await scenario.job(job_id))["attempt"] == "0"
    await scenario.settled()


@pytest.mark.promise(
    "Access: readers at several frontends keep a job alive; jobs without readers leave the queue"
)
async def test_a_plain_job_outlives_the_frontend_of_one_of_its_readers(scenario: Scenario) -> None:
    await scenario.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    posted = [scenario.client(400, first_url=at) for at in range(2)]
    async with scenario.middle_of(posted):
        job_ids = [client.reading.job_id for client in posted]
        tails = [
            scenario.reader_of(job_ids[at], client.reading.prompt, 400, first_url=1 - at)
            for at, client in enumerate(posted)
        ]
        for tail in tails:
            await tail.tokens(10)
        marks = [(await scenario.job(job_id))["fe"] for job_id in job_ids]
        scenario.deployment.frontends[0].kill()

        async def is_taken_over() -> bool:
            return (await scenario.job(job_ids[0]))["fe"] not in marks

        await until(is_taken_over, "the reader at the other frontend to take the mark over")
        assert (await scenario.job(job_ids[1]))["fe"] == marks[1]
    await scenario.all_finished([posted[1], *tails])
    await scenario.settled()


async def test_a_stopping_frontend_lets_short_streams_finish_and_cuts_long_ones(
    scenario: Scenario,
) -> None:
    leaving, _ = await scenario.deployment.use_frontends(SHUTDOWN_TIMEOUT_S=6)
    short = [scenario.client(60, first_url=0) for _ in range(4)]
    long = [scenario.client(300, first_url=0, resumes=True) for _ in range(4)]
    async with scenario.middle_of([*short, *long]):
        leaving.terminate()
        await until(lambda: " draining: " in leaving.log, "the drain")
        assert await leaving.status("/ready") == 503
        # From here on the short ones are let go, and the long ones until they are longer.
        scenario.deployment.throttle.apply(100)
        await scenario.all_finished(short)
        assert await leaving.ended() == 0
    await scenario.all_finished(long)
    assert all(client.reading.num_connections == 1 for client in short)
    assert all("frontend_draining" in client.reading.interruptions for client in long)
    await scenario.settled()


async def test_several_readers_of_one_job_all_read_the_whole(scenario: Scenario) -> None:
    prompt = list(range(60, 90))
    job_id = await scenario.submit(prompt, 150)
    readers = [scenario.reader_of(job_id, prompt, 150, first_url=i) for i in range(3)]
    async with scenario.middle_of(readers):
        scenario.deployment.frontends[1].kill()
        readers.append(scenario.reader_of(job_id, prompt, 150, first_url=1))
    await scenario.all_finished(readers)
    await asyncio.gather(*(reader.close() for reader in readers))
    await scenario.settled()
