"""A request that is sent again, at another frontend, under its key: one job."""

from __future__ import annotations

import asyncio

from tests.chaos.harness.scenario import Scenario

PROMPT = list(range(60, 90))


async def test_one_key_at_two_frontends_at_once_is_one_job_and_two_equal_streams(
    scenario: Scenario,
) -> None:
    num_keys = 8
    clients = [
        scenario.client(60, prompt=PROMPT, first_url=turn % 2, key=f"key {turn // 2}")
        for turn in range(2 * num_keys)
    ]
    await scenario.all_finished(clients)
    job_ids = [client.reading.job_id for client in clients]
    assert job_ids[::2] == job_ids[1::2]
    assert len(set(job_ids)) == num_keys
    totals = (await scenario.transport.registry.queue_stats()).totals
    late = scenario.client(60, prompt=PROMPT, first_url=1, key="key 0")
    await scenario.all_finished([late])
    assert late.reading.job_id == job_ids[0]
    assert (await scenario.transport.registry.queue_stats()).totals == totals
    await scenario.settled()


async def test_a_request_sent_again_after_its_frontend_died_reads_the_same_job(
    scenario: Scenario,
) -> None:
    first = [scenario.client(150, first_url=0, key=f"again {number}") for number in range(4)]
    async with scenario.middle_of(first):
        scenario.deployment.frontends[0].kill()
        await asyncio.gather(*(client.ended() for client in first))
        again = [
            scenario.client(150, prompt=client.reading.prompt, first_url=1, key=f"again {number}")
            for number, client in enumerate(first)
        ]
        for client in again:
            await client.tokens(10)
    await scenario.all_finished(again)
    for client, before in zip(again, first, strict=True):
        assert client.reading.job_id == before.reading.job_id
        assert client.reading.text.startswith(before.reading.text)
        assert (await scenario.job(client.reading.job_id))["attempt"] == "1"
    await scenario.settled()
