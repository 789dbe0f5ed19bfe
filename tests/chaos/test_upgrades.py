"""Two releases at work together: the next one raises the schema and says things that are news.

The next release is this one with its schema version raised and unknown fields, members and frames
in all that it writes (tests/support/faults/next_release.py).
"""

from __future__ import annotations

from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

NEXT = {"CHAOS_SCHEMA": 2}


async def test_a_rolling_upgrade_of_everything_fails_nothing(scenario: Scenario) -> None:
    """Workers first: what a new frontend queues is left to new workers."""
    deployment = scenario.deployment
    clients = scenario.clients(8, 150, resumes=True)
    async with scenario.middle_of(clients):
        for old in list(deployment.workers):
            await deployment.start_worker(**NEXT).ready()
            await deployment.replaced(old)
        for old in list(deployment.frontends):
            deployment.start_frontend(**NEXT)
            await deployment.ready()
            await deployment.replaced(old)
        later = scenario.clients(4, 30)
    await scenario.all_finished([*clients, *later])
    for client in clients:
        assert (await scenario.job(client.reading.job_id))["crashes"] == "0"
    assert {(await scenario.job(client.reading.job_id))["v"] for client in later} == {"2"}
    await scenario.settled()


async def test_old_and_new_releases_work_side_by_side(scenario: Scenario) -> None:
    """Old workers run old jobs, new ones both; every frontend relays every job."""
    deployment = scenario.deployment
    (old,) = await deployment.use_workers(1)
    new = await deployment.start_worker(**NEXT).ready()
    await deployment.use_frontends(1)
    deployment.start_frontend(**NEXT)
    await deployment.ready()
    posted = [scenario.client(200, first_url=at % 2, on_disconnect="continue") for at in range(8)]
    async with scenario.middle_of(posted):
        versions = [(await scenario.job(client.reading.job_id))["v"] for client in posted]
        assert versions == ["1", "2"] * 4
        owners = {(await scenario.job(client.reading.job_id))["owner"] for client in posted[1::2]}
        assert owners == {new.worker_id}
        crossed = [
            scenario.reader_of(
                client.reading.job_id, client.reading.prompt, 200, first_url=1 - at % 2
            )
            for at, client in enumerate(posted)
        ]
        for reader in crossed:
            await reader.tokens(10)
        # Without a new worker the new jobs wait; the old ones go on.
        new.kill()
        deployment.throttle.release()
        await scenario.all_finished([*posted[::2], *crossed[::2]])
        await until(lambda: _no_pending(scenario, old.worker_id), "the old worker to be done")
        for client in posted[1::2]:
            assert (await scenario.job(client.reading.job_id))["attempt"] == "1"
        await deployment.start_worker(**NEXT).ready()
    await scenario.all_finished([*posted[1::2], *crossed[1::2]])
    await scenario.settled()


async def _no_pending(scenario: Scenario, worker_id: str) -> bool:
    statuses = await scenario.transport.registry.workers()
    return [s.stats["jobs"] for s in statuses if s.worker_id == worker_id] == [0]
