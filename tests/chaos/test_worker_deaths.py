"""A worker dies, freezes, or forgets to say its last word: its streams go on elsewhere."""

from __future__ import annotations

from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until


async def test_streams_of_a_killed_worker_go_on_at_another(scenario: Scenario) -> None:
    clients = scenario.clients(12, 120)
    async with scenario.middle_of(clients):
        victim = await scenario.worker_of(clients[0].reading.job_id)
        victim.kill()
    await scenario.all_finished(clients)
    assert (await scenario.job(clients[0].reading.job_id))["attempt"] == "2"
    await scenario.settled()


async def test_preempted_streams_and_those_that_overtook_them_go_on_at_another(
    scenario: Scenario,
) -> None:
    """All prompts begin alike: jobs are left to the worker that has the prefix, too."""
    await scenario.deployment.use_workers(MAX_NUM_SEQS=4)
    prefix = random_prompt(scenario.rng, 300)
    rows, urgent = [], []
    for number in range(8):
        prompt = prefix + random_prompt(scenario.rng)
        job_id = await scenario.submit(prompt, 120, lane=6)
        rows.append(scenario.reader_of(job_id, prompt, 120, first_url=number))
    async with scenario.middle_of(rows):  # they hold every slot
        for number in range(4):
            prompt = prefix + random_prompt(scenario.rng)
            urgent.append(scenario.client(60, prompt=prompt, first_url=number))
        for client in urgent:
            await client.tokens(1)
        victim = await scenario.worker_of(urgent[0].reading.job_id)
        victim.kill()
    await scenario.all_finished([*rows, *urgent])
    records = [await scenario.job(client.reading.job_id) for client in rows]
    # Those of the other worker at least; a dead one cannot say any more whom it preempted.
    assert any(record.get("preemptions", "0") != "0" for record in records)
    assert (await scenario.job(urgent[0].reading.job_id))["attempt"] != "1"
    await scenario.settled()


async def test_a_frozen_worker_that_wakes_says_nothing_twice(scenario: Scenario) -> None:
    clients = scenario.clients(8, 150)
    async with scenario.middle_of(clients):
        job_id = clients[0].reading.job_id
        zombie = await scenario.worker_of(job_id)
        zombie.freeze()
        await scenario.all_are([job_id], attempt="2")
        zombie.thaw()
    await scenario.all_finished(clients)
    await scenario.settled()


async def test_a_freeze_shorter_than_the_lease_is_only_a_pause(scenario: Scenario) -> None:
    # Long enough for a busy machine: between the freeze and the next heartbeat it must not end.
    await scenario.deployment.use_workers(LEASE_MS=60_000)
    client = scenario.client(150)
    async with scenario.middle_of([client]):
        worker = await scenario.worker_of(client.reading.job_id)
        worker.freeze()
        lease = scenario.transport.keys.worker(worker.worker_id)
        await until(lambda: _less_than(scenario, lease, 59_000), "a part of the lease")
        worker.thaw()
    await scenario.all_finished([client])
    assert (await scenario.job(client.reading.job_id))["attempt"] == "1"
    await scenario.settled()


async def _less_than(scenario: Scenario, lease: str, left_ms: int) -> bool:
    return bool(await scenario.redis.pttl(lease) < left_ms)
