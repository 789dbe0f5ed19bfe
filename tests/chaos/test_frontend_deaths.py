"""A frontend dies or leaves: its readers go on elsewhere, or their jobs end."""

from __future__ import annotations

import asyncio

from shared.messages import JobState
from tests.chaos.harness.polling import until
from tests.chaos.harness.stage import Stage


async def test_readers_of_a_killed_frontend_go_on_at_another(stage: Stage) -> None:
    clients = stage.clients(12, 120, resumes=True)
    async with stage.middle_of(clients):
        stage.deployment.frontends[0].kill()
    await stage.all_finished(clients)
    assert any(client.reading.num_connections > 1 for client in clients)
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
    return (await stage.transport.store.queue_stats()).queued == number


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
