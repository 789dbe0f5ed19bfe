"""A frontend dies or leaves: its readers go on elsewhere, or their jobs end."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import JobState
from tests.chaos.harness.polling import until
from tests.chaos.harness.stage import Stage

STANDSTILL_S = 9.0  # beyond a lease: more than the readers of a dead frontend have


async def test_readers_of_a_killed_frontend_go_on_at_another(stage: Stage) -> None:
    clients = stage.clients(12, 120, resumes=True)
    async with stage.middle_of(clients):
        stage.deployment.frontends[0].kill()
    await stage.all_finished(clients)
    assert any(client.reading.num_connections > 1 for client in clients)
    await stage.settled()


@pytest.mark.parametrize("num_frontends", [1, 2])
async def test_the_streams_of_a_frontend_that_stood_still_go_on(
    stage: Stage, num_frontends: int
) -> None:
    """Its lease has ended long since: workers and the other frontend look for orphans meanwhile."""
    await stage.deployment.use_workers(1, MAX_NUM_SEQS=4)
    frozen = (await stage.deployment.use_frontends(num_frontends, FRONTEND_LEASE_MS=2000))[0]
    running = [stage.client(200, first_url=0) for _ in range(4)]
    async with stage.middle_of(running):
        queued = [stage.client(20, first_url=0) for _ in range(3)]
        await until(lambda: _num_queued(stage, 3), "three jobs to wait")
        job_ids = await _job_ids(stage)
        frontend_id, _, _ = (await stage.job(job_ids[0]))["fe"].partition("#")
        lease = stage.transport.keys.frontend(frontend_id)
        frozen.freeze()

        async def has_ended() -> bool:
            return not await stage.redis.exists(lease)

        await until(has_ended, "its lease to end")
        await asyncio.sleep(STANDSTILL_S)
        assert [(await stage.job(job_id)).get("reason") for job_id in job_ids] == [None] * 7
        frozen.thaw()
    await stage.all_finished([*running, *queued])
    await stage.settled()


async def test_jobs_of_a_frontend_that_stands_still_for_too_long_are_orphaned(
    stage: Stage,
) -> None:
    """Its connections stay open, as those of a machine that lost its network."""
    victim, _ = await stage.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    running = [stage.client(450, first_url=0) for _ in range(2)]
    async with stage.middle_of(running):
        job_ids = await _job_ids(stage)
        victim.freeze()
        await until(lambda: _all_orphaned(stage, job_ids), "all to be orphaned")
        victim.thaw()
    for reading in await stage.all_ended(running):
        assert reading.error_code == "orphaned"
    await stage.settled()


async def test_jobs_with_a_grace_period_outlive_their_frontend_for_a_returning_reader(
    stage: Stage,
) -> None:
    clients = stage.clients(6, 150, resumes=True, on_disconnect="grace")
    async with stage.middle_of(clients):
        stage.deployment.frontends[0].kill()
        for client in clients[::2]:
            await until(lambda c=client: c.reading.num_connections > 1, "a reader to return")
    await stage.all_finished(clients)
    await stage.settled()


async def test_jobs_of_a_dead_frontend_are_orphaned_and_queued_ones_never_run(
    stage: Stage,
) -> None:
    await stage.deployment.use_workers(1, MAX_NUM_SEQS=2)
    await stage.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    victim = stage.deployment.frontends[0]
    running = [stage.client(450, first_url=0) for _ in range(2)]
    async with stage.middle_of(running):
        queued = [stage.client(20, first_url=0) for _ in range(3)]
        await until(lambda: _num_queued(stage, 3), "three jobs to wait")
        job_ids = await _job_ids(stage)
        victim.kill()
        await until(lambda: _all_orphaned(stage, job_ids), "all to be orphaned")
    for client in (*running, *queued):
        await client.ended()
        assert not client.reading.has_ended
    started = [client.reading.job_id for client in running]
    for job_id in set(job_ids) - set(started):
        assert (await stage.job(job_id))["attempt"] == "0"
    await stage.settled()


async def test_a_plain_job_outlives_the_frontend_of_one_of_its_readers(stage: Stage) -> None:
    await stage.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    posted = [stage.client(400, first_url=at) for at in range(2)]
    async with stage.middle_of(posted):
        job_ids = [client.reading.job_id for client in posted]
        tails = [
            stage.reader_of(job_ids[at], client.reading.prompt, 400, first_url=1 - at)
            for at, client in enumerate(posted)
        ]
        for tail in tails:
            await tail.tokens(10)
        marks = [(await stage.job(job_id))["fe"] for job_id in job_ids]
        stage.deployment.frontends[0].kill()

        async def is_taken_over() -> bool:
            return (await stage.job(job_ids[0]))["fe"] not in marks

        await until(is_taken_over, "the reader at the other frontend to take the mark over")
        assert (await stage.job(job_ids[1]))["fe"] == marks[1]
    await stage.all_finished([posted[1], *tails])
    await stage.settled()


async def _num_queued(stage: Stage, number: int) -> bool:
    return (await stage.transport.registry.queue_stats()).queued == number


async def _job_ids(stage: Stage) -> list[str]:
    live = await stage.redis.zrange(stage.transport.keys.live, 0, -1)
    return [job_id.decode() for job_id in live]


async def _all_orphaned(stage: Stage, job_ids: list[str]) -> bool:
    jobs = [await stage.job(job_id) for job_id in job_ids]
    return all((j["state"], j.get("reason")) == (JobState.CANCELLED, "orphaned") for j in jobs)


async def test_a_frontend_told_to_end_lets_short_streams_finish_and_cuts_long_ones(
    stage: Stage,
) -> None:
    leaving, _ = await stage.deployment.use_frontends(SHUTDOWN_TIMEOUT_S=6)
    short = [stage.client(60, first_url=0) for _ in range(4)]
    long = [stage.client(300, first_url=0, resumes=True) for _ in range(4)]
    async with stage.middle_of([*short, *long]):
        leaving.terminate()
        await until(lambda: " draining " in leaving.log, "the drain")
        assert await leaving.answers("/ready") == 503
        # From here on the short ones are let go, and the long ones until they are longer.
        stage.deployment.brake.apply(100)
        await stage.all_finished(short)
        assert await leaving.ended() == 0
    await stage.all_finished(long)
    assert all(client.reading.num_connections == 1 for client in short)
    assert all("frontend_draining" in client.reading.interruptions for client in long)
    await stage.settled()


async def test_several_readers_of_one_job_all_read_the_whole(stage: Stage) -> None:
    prompt = list(range(60, 90))
    job_id = await stage.submit(prompt, 150)
    readers = [stage.reader_of(job_id, prompt, 150, first_url=i) for i in range(3)]
    async with stage.middle_of(readers):
        stage.deployment.frontends[1].kill()
        readers.append(stage.reader_of(job_id, prompt, 150, first_url=1))
    await stage.all_finished(readers)
    await asyncio.gather(*(reader.close() for reader in readers))
    await stage.settled()
