"""The device fails: no job ends for it, and a worker without a device takes no more of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from shared.messages import Finished
from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.worker_process import Frontend, Result, until
from tests.support.faults.sitecustomize import DEVICE
from worker.settings import DEMO_CHECKPOINT, DEMO_MODEL_NAME

NUM_JOBS = 200
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
    said = await undisturbed(frontend)
    for number, result in enumerate(results):
        assert result.token_ids == said[tuple(prompt_of(number))].token_ids
        assert result.text == said[tuple(prompt_of(number))].text
    assert healthy.alive
