"""The device fails: no job ends for it, and a worker without a device takes no more of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from shared.messages import Finished
from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import TIMEOUT_S, Frontend, Result, echo
from tests.support.faults.sitecustomize import ASSERT_TOKEN, DEVICE, MEMORY, PLACE
from tests.support.polling import until
from worker.service import EXIT_GAVE_UP
from worker.settings import DEMO_CHECKPOINT, DEMO_MODEL_NAME

NUM_JOBS = 60
MODEL = {"MODEL": DEMO_CHECKPOINT, "SERVED_MODEL_NAME": DEMO_MODEL_NAME, "RUNNER": "model"}


class Device:
    """Of the workers that are given its `env`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.env = {DEVICE: str(path)}

    def fails_after(self, num_steps: int) -> None:
        """And stays so in every later process, until it is `back`."""
        self._path.write_text(str(num_steps))

    def back(self) -> None:
        self._path.unlink()


def prompt_of(number: int) -> list[int]:
    return [40 + number % 100, 41, 42 + number % 7, 50]


async def submit_all(frontend: Frontend, num_jobs: int) -> list[str]:
    return [
        await frontend.submit(prompt_of(number), max_tokens=12, ignore_eos=True)
        for number in range(num_jobs)
    ]


OPTIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 10},
]


async def submit_sampled(frontend: Frontend, num_jobs: int) -> list[str]:
    """Jobs that want each way of sampling in turn."""
    return [
        await frontend.submit(
            prompt_of(number), max_tokens=40, ignore_eos=True, **OPTIONS[number % len(OPTIONS)]
        )
        for number in range(num_jobs)
    ]


async def undisturbed(frontend: Frontend) -> dict[tuple[int, ...], Result]:
    """What a healthy worker says to each of the prompts."""
    prompts = {tuple(prompt_of(number)): number for number in range(NUM_JOBS)}
    results = {}
    for prompt in prompts:
        job_id = await frontend.submit(prompt, max_tokens=12, ignore_eos=True)
        results[prompt] = await frontend.result(job_id)
    return results


def endings(results: list[Result]) -> Counter[str]:
    return Counter(
        "finished" if isinstance(r.end, Finished) else str(r.failed.code) for r in results
    )


@pytest.mark.promise(
    "Runtime: every end has exactly one terminal event, with the text generated so far (steps, "
    "devices, memory, signals, deaths and lost data; a device's failures are simulated by the "
    "errors that torch raises for them)"
)
async def test_a_lost_device_ends_no_job_and_another_worker_does_them_all(
    start_worker: StartWorker, transport: RedisTransport, tmp_path: Path
) -> None:
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    device = Device(tmp_path / "device")
    broken = await start_worker(**MODEL, **device.env, MAX_NUM_SEQS=8).ready()
    device.fails_after(20)
    job_ids = await submit_all(frontend, NUM_JOBS)
    await until(lambda: "the engine process died" in broken.log, "the device to be lost")
    healthy = await start_worker(**MODEL, MAX_NUM_SEQS=8).ready()
    results = list(await asyncio.gather(*map(frontend.result, job_ids)))
    assert endings(results) == {"finished": NUM_JOBS}
    output = await undisturbed(frontend)
    for number, result in enumerate(results):
        assert result.token_ids == output[tuple(prompt_of(number))].token_ids
        assert result.text == output[tuple(prompt_of(number))].text
    assert healthy.alive


@pytest.mark.parametrize(("place", "lookahead"), [("launch", 1), ("sampler", 0), ("collect", 1)])
async def test_wherever_the_device_is_lost_the_same_tokens_come_once_and_in_order(
    start_worker: StartWorker,
    transport: RedisTransport,
    tmp_path: Path,
    place: str,
    lookahead: int,
) -> None:
    """By the restarted engine: the device is back for it."""
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    device = Device(tmp_path / "device")
    settings = {**MODEL, **device.env, PLACE: place, "LOOKAHEAD": lookahead, "MAX_NUM_SEQS": 8}
    worker = await start_worker(**settings).ready()
    expected = await asyncio.gather(*map(frontend.result, await submit_sampled(frontend, 12)))
    device.fails_after(17)
    job_ids = await submit_sampled(frontend, 12)
    await until(lambda: "the engine process died" in worker.log, "the device to be lost")
    device.back()
    found = list(await asyncio.gather(*map(frontend.result, job_ids)))
    assert endings(found) == {"finished": 12}
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [r.text for r in found] == [r.text for r in expected]
    assert "an illegal memory access was encountered" in worker.log


async def test_a_device_that_is_lost_while_graphs_are_captured_costs_no_job(
    start_worker: StartWorker, transport: RedisTransport, tmp_path: Path
) -> None:
    """The engine that was to go on with the jobs is not built; the one after it is."""
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    device = Device(tmp_path / "device")
    worker = await start_worker(
        **MODEL, **device.env, **{PLACE: "capture"}, MAX_NUM_SEQS=8, LOOKAHEAD=1
    ).ready()
    expected = await asyncio.gather(*map(frontend.result, await submit_sampled(frontend, 8)))
    device.fails_after(0)
    job_ids = await submit_sampled(frontend, 8)
    (engine_pid,) = worker.engine_pids()
    os.kill(engine_pid, signal.SIGKILL)
    await until(lambda: "the engine failed to restart" in worker.log, "the capture to fail")
    assert "an illegal memory access was encountered" in worker.log
    device.back()
    found = list(await asyncio.gather(*map(frontend.result, job_ids)))
    assert endings(found) == {"finished": 8}
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


async def test_a_device_that_comes_back_is_used_again_by_the_same_worker(
    start_worker: StartWorker, transport: RedisTransport, tmp_path: Path
) -> None:
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    device = Device(tmp_path / "device")
    worker = await start_worker(**MODEL, **device.env, MAX_NUM_SEQS=8).ready()
    device.fails_after(10)
    job_ids = await submit_all(frontend, 24)
    await until(lambda: "the engine process died" in worker.log, "the device to be lost")
    device.back()
    results = list(await asyncio.gather(*map(frontend.result, job_ids)))
    assert endings(results) == {"finished": 24}
    deadline_s = time.monotonic() + TIMEOUT_S
    while (status := (await transport.registry.workers())[0]).stalled:  # until the next heartbeat
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    assert status.stats["device_failures"] == 1


async def test_a_worker_without_a_device_stalls_then_gives_up_and_keeps_no_job(
    start_worker: StartWorker, transport: RedisTransport, tmp_path: Path
) -> None:
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    device = Device(tmp_path / "device")
    worker = await start_worker(**MODEL, **device.env, MAX_NUM_SEQS=8, ENGINE_RESTARTS=2).ready()
    device.fails_after(10)
    job_ids = await submit_all(frontend, 24)
    seen_stalled = False
    deadline_s = time.monotonic() + TIMEOUT_S
    while worker.alive:
        assert time.monotonic() < deadline_s
        seen_stalled |= any(status.stalled for status in await transport.registry.workers())
        await asyncio.sleep(0.02)
    assert seen_stalled
    assert await worker.ended() == EXIT_GAVE_UP
    assert "giving up" in worker.log
    assert "died or could not be started 3 times within 600 seconds" in worker.log
    assert "an illegal memory access was encountered" in worker.log
    redis = transport.connections.commands
    for job_id in job_ids:
        job = transport.keys.job(job_id)
        state, crashes, deaths = await redis.hmget(job, "state", "crashes", "deaths")
        assert state in (b"queued", b"finished")
        assert (crashes, deaths) == (b"0", None)
    assert not await redis.exists(transport.keys.dead_letters)
    device.back()
    await start_worker(**MODEL, **device.env, MAX_NUM_SEQS=8).ready()  # as a supervisor does
    results = list(await asyncio.gather(*map(frontend.result, job_ids)))
    assert endings(results) == {"finished": 24}


async def test_a_job_under_which_every_device_fails_is_found_and_no_other_is_blamed(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    worker = await start_worker(MAX_NUM_SEQS=8, ECHO_STEP_MS=5, ENGINE_RESTARTS=20).ready()
    poison = await frontend.submit([ASSERT_TOKEN, 40, 41], max_tokens=10)
    prompts = [[60 + number, 70, 71] for number in range(40)]
    job_ids = [await frontend.submit(prompt, max_tokens=30) for prompt in prompts]
    results = await asyncio.gather(*map(frontend.result, job_ids))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == echo(prompt, 30)
        assert isinstance(result.end, Finished)
    end = await frontend.result(poison)
    assert end.failed.code in ("poison", "engine_died")
    assert worker.log.count("the engine process died") <= 10
    assert await transport.connections.commands.xlen(transport.keys.dead_letters) == 1


@pytest.mark.parametrize(
    ("place", "most"), [("launch", 20), ("sampler", 3), ("collect", 3)], ids=str
)
async def test_a_step_out_of_memory_is_computed_again_in_smaller_ones(
    start_worker: StartWorker, transport: RedisTransport, place: str, most: int
) -> None:
    frontend = Frontend(transport.store, DEMO_MODEL_NAME)
    prompts = [[40 + (number + i) % 90 for i in range(120)] for number in range(6)]

    async def answers() -> list[Result]:
        jobs = [
            await frontend.submit(p, max_tokens=12, ignore_eos=True, **OPTIONS[i % len(OPTIONS)])
            for i, p in enumerate(prompts)
        ]
        return list(await asyncio.gather(*map(frontend.result, jobs)))

    tight = await start_worker(
        **MODEL, **{MEMORY: most, PLACE: place}, MAX_NUM_SEQS=8, LOOKAHEAD=1
    ).ready()
    in_small_steps = await answers()
    (status,) = await transport.registry.workers()
    while not status.stats["failed_steps"]:  # until a heartbeat that is later than the answers
        await asyncio.sleep(0.05)
        (status,) = await transport.registry.workers()
    assert status.stats["engine_restarts"] == 0
    tight.signal(signal.SIGTERM)
    assert await tight.ended() == 0
    await start_worker(**MODEL, MAX_NUM_SEQS=8).ready()
    undisturbed = await answers()
    assert endings(in_small_steps) == {"finished": len(prompts)}
    assert [r.text for r in in_small_steps] == [r.text for r in undisturbed]
