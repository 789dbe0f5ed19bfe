"""Turns of conversations go back to the worker process whose cache has their beginning."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend
from tests.support.launched import free_port
from tests.support.metrics import Scrape
from tests.support.polling import until

FAR_MS = 10_000  # so that a worker without a core for a while loses no job
PROMPTS = [[first, *range(40, 40 + 199)] for first in range(40, 46)]


async def test_the_second_turn_goes_where_the_first_one_was(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    settings = {"ECHO_STEP_MS": 5, "AFFINITY_WAIT_MS": FAR_MS}
    first = free_port(2)
    ports = (first, first + 1)
    for worker in [start_worker(**settings, METRICS_PORT=port) for port in ports]:
        await worker.ready()

    def by_prefix() -> float:
        scrapes = [Scrape.of(f"http://127.0.0.1:{port}/metrics") for port in ports]
        return sum(scrape.total("penstock:jobs_by_prefix_total") for scrape in scrapes)

    owners = []
    for prompt in PROMPTS:  # several at once, so that both workers get some
        job_ids = await asyncio.gather(frontend.submit(prompt), frontend.submit([7] * 300))
        for job_id in job_ids:
            await frontend.result(job_id)
        record = await transport.store.get(job_ids[0])
        assert record is not None
        owners.append(record.owner)
    redis: Any = transport.connections.commands

    async def are_noted() -> bool:
        keys = [transport.keys.prefixes(owner or "") for owner in set(owners)]
        return sum([await redis.scard(key) for key in keys]) >= len(PROMPTS)

    await until(are_noted)
    before = by_prefix()  # of the other prompts, which are alike
    for prompt, owner in zip(PROMPTS, owners, strict=True):
        job_id = await frontend.submit([*prompt, *range(100, 160)])
        await frontend.result(job_id)
        record = await transport.store.get(job_id)
        assert record is not None
        assert (record.owner, record.placed) == (owner, "prefix")
        assert record.cached_tokens >= 128
    assert by_prefix() - before == len(PROMPTS)
