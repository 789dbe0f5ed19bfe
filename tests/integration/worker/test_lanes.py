"""A job of a higher lane takes the slot of a running batch row, and no token is lost by it."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import ClaimEnd
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend, echo
from tests.support.throttle import Throttle
from worker.service import HAND_BACK_PREEMPTED_S

BATCH = 7
PROMPT = list(range(40, 70))


async def preemptions(transport: RedisTransport, job_ids: list[str]) -> int:
    records = [await transport.store.get(job_id) for job_id in job_ids]
    return sum(record.preemptions for record in records if record is not None)


async def rows(frontend: Frontend, count: int, max_tokens: int) -> list[str]:
    return [
        await frontend.submit(PROMPT[i:], lane=BATCH, max_tokens=max_tokens, tenant=f"batch {i}")
        for i in range(count)
    ]


@pytest.mark.promise(
    "Access: a job of a higher lane takes the slot of a running one of a lower lane, which resumes "
    "later with the same output, there or on another worker (not with PENSTOCK_ENGINE=http or "
    "vLLM's own sampler); a job is preempted at most four times"
)
async def test_an_urgent_job_runs_while_rows_hold_every_slot_and_they_say_the_same(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    await start_worker(MAX_NUM_SEQS=2, ECHO_STEP_MS=5).ready()
    throttle.apply(after_tokens=30)
    job_ids = await rows(frontend, 3, 200)
    for job_id in job_ids[:2]:
        await frontend.num_tokens(job_id, 10)
    urgent = await frontend.submit(PROMPT, max_tokens=8)
    assert (await frontend.result(urgent)).token_ids == echo(PROMPT, 8)
    states = [await frontend.state(job_id) for job_id in job_ids]
    assert states == [JobState.RUNNING, JobState.RUNNING, JobState.QUEUED]
    throttle.release()
    for i, job_id in enumerate(job_ids):
        result = await frontend.result(job_id)
        assert result.token_ids == echo(PROMPT[i:], 200)
        record = await transport.store.get(job_id)
        assert record is not None
        assert record.attempt == 1, "it never left its worker"
    assert await preemptions(transport, job_ids) == 1


async def test_a_worker_that_is_killed_with_a_preempted_row_loses_nothing_of_it(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    first = await start_worker(MAX_NUM_SEQS=1, ECHO_STEP_MS=5).ready()
    throttle.apply(after_tokens=30)
    (row,) = await rows(frontend, 1, 200)
    await frontend.num_tokens(row, 10)
    urgent = await frontend.submit(PROMPT, max_tokens=100)
    await frontend.num_tokens(urgent, 10)
    assert await frontend.state(row) is JobState.RUNNING
    first.kill()
    await start_worker(MAX_NUM_SEQS=2, ECHO_STEP_MS=5).ready()
    throttle.release()
    assert (await frontend.result(urgent)).token_ids == echo(PROMPT, 100)
    assert (await frontend.result(row)).token_ids == echo(PROMPT, 200)


async def test_a_row_that_waits_for_its_slot_goes_on_at_another_worker(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    await start_worker(MAX_NUM_SEQS=1, ECHO_STEP_MS=5).ready()
    throttle.apply(after_tokens=30, step_s=2 * HAND_BACK_PREEMPTED_S)
    (row,) = await rows(frontend, 1, 60)
    await frontend.num_tokens(row, 10)
    urgent = await frontend.submit(PROMPT, max_tokens=60)
    await frontend.num_tokens(urgent, 10)
    await start_worker(MAX_NUM_SEQS=1, ECHO_STEP_MS=5).ready()
    async with asyncio.timeout(6 * HAND_BACK_PREEMPTED_S):
        while (record := await transport.store.get(row)) is None or record.attempt == 1:
            await asyncio.sleep(0.05)
    assert record.claims[0].cause == ClaimEnd.PREEMPTED
    throttle.release()
    assert (await frontend.result(row)).token_ids == echo(PROMPT, 60)
    assert (await frontend.result(urgent)).token_ids == echo(PROMPT, 60)
    assert await preemptions(transport, [row]) == 1
