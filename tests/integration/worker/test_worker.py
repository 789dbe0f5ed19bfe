from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import redis.asyncio

from penstock.launcher.processes import ReportPipe
from penstock.launcher.redis_server import PrivateServer
from shared.messages import FinishReason, JobState
from shared.text.model_card import ModelCard
from shared.text.text_model import load_text
from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import TIMEOUT_S, Frontend, echo
from tests.support.polling import until
from tests.support.throttle import Throttle

PROMPT = list(range(40, 70))


async def text_of(transport: RedisTransport, model: str, token_ids: list[int]) -> str:
    card = ModelCard.from_json((await transport.registry.models())[model].card)
    blobs = {}
    for digest in card.digests:
        blob = await transport.registry.get_blob(digest)
        assert blob is not None
        blobs[digest] = blob
    return load_text(card, blobs).tokenizer.decode(token_ids)


def gone(pid: int) -> bool:
    """True when the process has ended (a zombie that nobody has waited for has ended too)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


async def assert_idle(transport: RedisTransport) -> None:
    """All blocks are free and nothing runs, says the last heartbeat."""

    async def idle() -> bool:
        statuses = await transport.registry.workers()
        return bool(statuses) and all(
            s.stats["running"] == s.stats["jobs"] == 0
            and s.stats["free_blocks"] == s.stats["total_blocks"]
            for s in statuses
        )

    deadline_s = time.monotonic() + TIMEOUT_S
    while not await idle():
        assert time.monotonic() < deadline_s, await transport.registry.workers()
        await asyncio.sleep(0.02)


async def test_it_tells_its_launcher_that_it_serves(start_worker: StartWorker) -> None:
    with ReportPipe() as pipe:
        worker = start_worker(**pipe.environment, pass_fds=pipe.pass_fds)
        assert pipe.read() == (False, "")
        await worker.ready()
        assert pipe.read() == (True, "")


async def test_the_first_heartbeat_has_all_fields_of_later_ones(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    """Nobody who looks at a worker has to wonder whether its engine has made a step yet."""
    worker = start_worker(BEAT_INTERVAL_MS=60_000, LEASE_MS=600_000)
    await until(lambda: " ready " in worker.log, "the worker to be ready")
    (first,) = await transport.registry.workers()
    assert first.stats["generated_tokens"] == first.stats["step"] == 0
    assert first.stats["free_blocks"] == first.stats["total_blocks"]
    worker.close()
    await transport.queue.declare_dead(first.worker_id)
    await start_worker().ready()
    await frontend.result(await frontend.submit(PROMPT, max_tokens=5))
    (later,) = await transport.registry.workers()
    assert later.stats.keys() == first.stats.keys()


async def test_a_job_ends_once_with_the_right_tokens_and_text(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    await start_worker().ready()
    result = await frontend.result(await frontend.submit(PROMPT, max_tokens=50))
    assert result.token_ids == echo(PROMPT, 50)
    assert result.text == await text_of(transport, frontend.model, result.token_ids)
    assert result.finished.reason is FinishReason.LENGTH
    assert result.finished.usage.prompt_tokens == len(PROMPT)
    assert result.finished.usage.completion_tokens == 50
    await assert_idle(transport)


async def test_tokens_are_logged_one_by_one_when_the_store_keeps_up(
    start_worker: StartWorker, frontend: Frontend
) -> None:
    """At a pace at which it does on a busy machine too."""
    await start_worker(ECHO_STEP_MS=150).ready()
    result = await frontend.result(await frontend.submit(PROMPT, max_tokens=12))
    assert len(result.deltas) >= 9


async def test_a_job_ends_at_its_deadline(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    await start_worker(ECHO_STEP_MS=20).ready()
    throttle.apply(3)
    job_id = await frontend.submit(PROMPT, max_tokens=450, timeout_ms=600)
    result = await frontend.result(job_id)
    assert (result.failed.state, result.failed.code) == (JobState.EXPIRED, "deadline_exceeded")
    await assert_idle(transport)


async def test_an_engine_that_keeps_dying_ends_the_worker_and_loses_nothing(
    start_worker: StartWorker, frontend: Frontend, throttle: Throttle
) -> None:
    worker = await start_worker(ECHO_STEP_MS=10, ENGINE_RESTARTS=0).ready()
    throttle.apply(5)
    job_id = await frontend.submit(PROMPT, max_tokens=100)
    await frontend.num_tokens(job_id, 5)
    os.kill(worker.engine_pids()[0], signal.SIGKILL)
    assert await worker.ended() == 70
    assert await frontend.state(job_id) is JobState.QUEUED
    throttle.release()
    await start_worker().ready()
    assert (await frontend.result(job_id)).token_ids == echo(PROMPT, 100)


@pytest.mark.promise("Streaming: SIGTERM to a worker loses nothing")
async def test_sigterm_lets_running_jobs_finish(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    worker = await start_worker(ECHO_STEP_MS=10).ready()
    throttle.apply(3)
    job_id = await frontend.submit(PROMPT, max_tokens=60)
    await frontend.num_tokens(job_id, 3)
    worker.signal(signal.SIGTERM)
    await until(lambda: " draining: " in worker.log, "the drain")  # before, it still takes work
    late = await frontend.submit(PROMPT)
    throttle.release()
    assert await worker.ended() == 0
    assert (await frontend.result(job_id)).token_ids == echo(PROMPT, 60)
    record = await transport.store.get(job_id)
    assert record is not None
    assert record.attempt == 1
    assert await frontend.state(late) is JobState.QUEUED
    assert await transport.registry.workers() == []


async def test_a_second_sigterm_hands_back_at_once(
    start_worker: StartWorker, frontend: Frontend
) -> None:
    worker = await start_worker(ECHO_STEP_MS=50, DRAIN_TIMEOUT_S=3600).ready()
    job_id = await frontend.submit(PROMPT, max_tokens=400)
    await frontend.num_tokens(job_id, 3)
    worker.signal(signal.SIGTERM)
    await until(lambda: " draining: " in worker.log, "the drain")
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert await frontend.state(job_id) is JobState.QUEUED


@pytest.mark.promise("HTTP: an idle worker stops at once")
async def test_an_idle_worker_ends_at_once_and_leaves_no_process(
    start_worker: StartWorker, frontend: Frontend
) -> None:
    worker = await start_worker(DRAIN_TIMEOUT_S=3600).ready()
    (engine,) = worker.engine_pids()
    worker.signal(signal.SIGINT)
    assert await worker.ended() == 0
    assert gone(engine)


async def test_a_killed_worker_takes_its_engine_along_and_another_goes_on(
    start_worker: StartWorker, frontend: Frontend, throttle: Throttle
) -> None:
    worker = await start_worker(ECHO_STEP_MS=10).ready()
    throttle.apply(5)
    (engine,) = worker.engine_pids()
    job_id = await frontend.submit(PROMPT, max_tokens=100)
    await frontend.num_tokens(job_id, 5)
    worker.signal(signal.SIGKILL)
    await worker.ended()
    await until(lambda: gone(engine), "the engine to die with its service")
    throttle.release()
    await start_worker().ready()
    assert (await frontend.result(job_id)).token_ids == echo(PROMPT, 100)


async def test_a_worker_that_cannot_load_its_model_logs_it_and_ends(
    start_worker: StartWorker, tmp_path: Path, checkpoint: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "abacus"}')
    (broken / "tokenizer.json").write_text("{}")
    worker = start_worker(MODEL=broken, RUNNER="model")
    assert await worker.ended() == 2
    assert "abacus" in worker.log


async def test_a_device_that_is_not_there_ends_the_worker_like_a_bad_setting(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(RUNNER="model", DEVICE="cuda:77")
    assert await worker.ended() == 2
    assert "cuda:77" in worker.log
    assert "Traceback" not in worker.log


async def test_a_real_model_answers_through_the_queue(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    await start_worker(RUNNER="model", NUM_KV_BLOCKS=128, DTYPE="float32").ready()
    job_ids = [
        await frontend.submit(PROMPT, max_tokens=24, ignore_eos=True, logprobs=2) for _ in range(3)
    ]
    results = await asyncio.gather(*map(frontend.result, job_ids))
    assert len({tuple(result.token_ids) for result in results}) == 1
    first = results[0]
    assert len(first.token_ids) == 24
    assert first.text == await text_of(transport, frontend.model, first.token_ids)
    logprobs = [entry for delta in first.deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == first.token_ids
    assert all(entry.logprob <= 0 for entry in logprobs)
    await assert_idle(transport)


async def test_prompts_that_find_no_blocks_stay_in_the_queue_for_others(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    """512 tokens hold two of these; the worker takes one more, which waits."""
    prompts = [list(range(60 + i, 60 + i + 200)) for i in range(6)]
    job_ids = [await frontend.submit(prompt, max_tokens=30) for prompt in prompts]
    await start_worker(ECHO_STEP_MS=20, NUM_KV_BLOCKS=32, BLOCK_SIZE=16).ready()
    most = 0
    while JobState.QUEUED in (states := [await frontend.state(job_id) for job_id in job_ids]):
        most = max(most, states.count(JobState.RUNNING))
        await asyncio.sleep(0.005)
    assert 0 < most <= 3
    results = await asyncio.gather(*map(frontend.result, job_ids))
    assert [result.token_ids for result in results] == [echo(prompt, 30) for prompt in prompts]
    await assert_idle(transport)


async def test_a_worker_that_still_waits_for_its_server_ends_on_sigterm(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker(url=f"unix://{tmp_path}/nowhere.sock")
    await until(lambda: "waiting for Redis" in worker.log, "the worker to wait")
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert worker.engine_pids() == []


async def test_a_server_that_would_lose_jobs_is_refused(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    server = PrivateServer(tmp_path / "data")
    url = server.start()
    try:
        client = redis.asyncio.Redis.from_url(url)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await client.aclose()
        worker = start_worker(url=url)
        assert await worker.ended() == 2
        assert "maxmemory-policy is allkeys-lru" in worker.log
    finally:
        server.stop()
