"""How jobs that come together divide over worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest

from shared.transport.connect import RedisTransport
from shared.transport.pulls import ASKING_MS
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend

PROMPT = list(range(40, 70))


async def owners_of(transport: RedisTransport, job_ids: list[str]) -> Counter[str]:
    """How many of these jobs each worker ran."""
    records = [await transport.store.get(job_id) for job_id in job_ids]
    return Counter(record.owner or "" for record in records if record is not None)


@pytest.mark.promise(
    "Access: jobs that arrive together divide evenly over the workers that pull, and a stopped "
    "worker delays none (by number, within 50 ms of their submit; the speed of a worker does not "
    "count)"
)
async def test_streams_that_begin_together_divide_evenly_over_two_workers(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    """Mostly: a worker without a core for as long as jobs are deferred to it loses them."""
    for worker in [start_worker(ECHO_STEP_MS=20) for _ in range(2)]:
        await worker.ready()
    divisions = []
    for _ in range(5):
        job_ids = await asyncio.gather(*(frontend.submit(PROMPT) for _ in range(4)))
        for job_id in job_ids:
            await frontend.result(job_id)
        divisions.append(sorted((await owners_of(transport, job_ids)).values()))
    assert divisions.count([2, 2]) >= 3, divisions


async def test_a_stopped_worker_holds_no_job_back(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    """Its lease runs on, and it has asked for work just before."""
    stopped = await start_worker(ECHO_STEP_MS=20, LEASE_MS=600_000).ready()
    redis: Any = transport.connections.commands
    (name,) = await redis.hkeys(transport.keys.workers)
    await start_worker(ECHO_STEP_MS=20).ready()

    async def asked_ms() -> int:
        return int(await redis.hget(transport.keys.worker(name.decode()), "pull_ms"))

    os.kill(stopped.pid, signal.SIGSTOP)
    # The pull that it had sent behind its wait for work, which lasts a second at most; on a busy
    # machine it has come before the look here.
    before_ms, over_s = await asked_ms(), time.monotonic() + 1.1
    while await asked_ms() == before_ms and time.monotonic() < over_s:
        await asyncio.sleep(0.01)
    job_ids = await asyncio.gather(*(frontend.submit(PROMPT) for _ in range(4)))
    for job_id in job_ids:
        await frontend.result(job_id)
        record = await transport.store.get(job_id)
        assert record is not None
        assert record.owner != name.decode()
        assert record.started_ms is not None
        # Sooner than the stopped worker ceases to count among those that ask.
        assert record.started_ms - record.submitted_ms < ASKING_MS // 2
