"""A frontend dies or leaves: its readers go on elsewhere, or their jobs end."""

from __future__ import annotations

import asyncio

from shared.messages import JobState
from tests.chaos.harness.polling import until
from tests.chaos.harness.stage import Stage


async def test_readers_of_a_killed_frontend_go_on_at_another(stage: Stage) -> None:
    clients = stage.clients(12, 120, resumes=True)
    for client in clients:
        await client.tokens(10)
    stage.deployment.frontends[0].kill()
    await stage.all_finished(clients)
    assert any(client.reading.num_connections > 1 for client in clients)
    await stage.settled()


async def test_jobs_with_a_grace_period_outlive_their_frontend_for_a_returning_reader(
    stage: Stage,
) -> None:
    clients = stage.clients(6, 400, resumes=True, on_disconnect="grace")
    for client in clients:
        await client.tokens(10)
    stage.deployment.frontends[0].kill()
    await stage.all_finished(clients)
    await stage.settled()


async def test_jobs_of_a_dead_frontend_are_orphaned_and_queued_ones_never_run(
    stage: Stage,
) -> None:
    await stage.deployment.use_workers(1, MAX_NUM_SEQS=2)
    await stage.deployment.use_frontends(2, FRONTEND_LEASE_MS=2000)
    victim = stage.deployment.frontends[0]
    running = [stage.client(450, first_url=0) for _ in range(2)]
    for client in running:
        await client.tokens(5)
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
    leaving = stage.deployment.frontends[0]
    short = [stage.client(30, first_url=0) for _ in range(4)]
    long = [stage.client(300, first_url=0, resumes=True) for _ in range(4)]
    for client in (*short, *long):
        await client.tokens(3)
    leaving.terminate()
    await until(lambda: _answers(stage, 503), "the frontend to be unready")
    assert await leaving.ended(timeout_s=10) == 0
    await stage.all_finished([*short, *long])
    assert all(client.reading.num_connections == 1 for client in short)
    assert all("frontend_draining" in client.reading.interruptions for client in long)
    await stage.settled()


async def _answers(stage: Stage, status: int) -> bool:
    return await stage.deployment.frontends[0].answers("/ready") == status


async def test_several_readers_of_one_job_all_read_the_whole(stage: Stage) -> None:
    prompt = list(range(60, 90))
    job_id = await stage.submit(prompt, 150)
    readers = [stage.reader_of(job_id, prompt, 150) for _ in range(3)]
    for reader in readers:
        await reader.tokens(5)
    late = stage.reader_of(job_id, prompt, 150)
    stage.deployment.frontends[1].kill()
    await stage.all_finished([*readers, late])
    await asyncio.gather(*(reader.close() for reader in readers))
    await stage.settled()
