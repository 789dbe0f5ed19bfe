"""A worker dies, freezes, or forgets to say its last word: its streams go on elsewhere."""

from __future__ import annotations

from tests.chaos.harness.polling import until
from tests.chaos.harness.stage import Stage


async def test_streams_of_a_killed_worker_go_on_at_another(stage: Stage) -> None:
    clients = stage.clients(12, 120)
    async with stage.middle_of(clients):
        victim = await stage.worker_of(clients[0].reading.job_id)
        victim.kill()
    await stage.all_finished(clients)
    assert (await stage.job(clients[0].reading.job_id))["attempt"] == "2"
    await stage.settled()


async def test_a_frozen_worker_that_wakes_says_nothing_twice(stage: Stage) -> None:
    clients = stage.clients(8, 150)
    async with stage.middle_of(clients):
        job_id = clients[0].reading.job_id
        zombie = await stage.worker_of(job_id)
        zombie.freeze()
        await until(lambda: _attempt(stage, job_id, "2"), "the takeover")
        zombie.thaw()
    await stage.all_finished(clients)
    await stage.settled()


async def _attempt(stage: Stage, job_id: str, attempt: str) -> bool:
    return (await stage.job(job_id))["attempt"] == attempt


async def test_a_freeze_shorter_than_the_lease_is_only_a_pause(stage: Stage) -> None:
    # Long enough for a busy machine: between the freeze and the next beat it must not end.
    await stage.deployment.use_workers(LEASE_MS=60_000)
    client = stage.client(150)
    async with stage.middle_of([client]):
        worker = await stage.worker_of(client.reading.job_id)
        worker.freeze()
        lease = stage.transport.keys.worker(worker.worker_id)
        await until(lambda: _less_than(stage, lease, 59_000), "a part of the lease")
        worker.thaw()
    await stage.all_finished([client])
    assert (await stage.job(client.reading.job_id))["attempt"] == "1"
    await stage.settled()


async def _less_than(stage: Stage, lease: str, left_ms: int) -> bool:
    return bool(await stage.redis.pttl(lease) < left_ms)
