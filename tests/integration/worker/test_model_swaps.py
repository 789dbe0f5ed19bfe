"""A worker with a list of models serves one at a time, and loads another when jobs wait for it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.registry import Order, Ordered
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend, echo
from tests.support.checkpoints import make_checkpoint
from tests.support.polling import until
from tests.support.running_service import RunningService, running_frontend
from tests.support.service_processes import WorkerProcess
from tests.support.throttle import Throttle
from worker.model_swaps import LOOK_S, UNKNOWN_SWAP_S

pytestmark = pytest.mark.timeout(240)

NAMES = ("one", "two", "three")
PROMPT = [5, 6, 7]
BOUND_S = 1.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three checkpoints with weights of their own."""
    directory = tmp_path_factory.mktemp("several")
    return {name: make_checkpoint(directory / name, seed=seed) for seed, name in enumerate(NAMES)}


def of_list(models: dict[str, Path], **settings: Any) -> dict[str, Any]:
    listed = ",".join(f"{name}={path}" for name, path in models.items())
    return {"MODEL": "", "MODELS": listed, "MODEL_SWAP_WAIT_S": BOUND_S, **settings}


def frontends(transport: RedisTransport) -> dict[str, Frontend]:
    return {name: Frontend(transport.store, name) for name in NAMES}


def swaps(worker: WorkerProcess) -> list[tuple[str, float, float]]:
    """Returns the model, and the seconds of drain and load, of each swap in its log."""
    found = re.findall(
        r"another model is served model=(\S+) drain_s=(\S+) swap_s=(\S+)", worker.log
    )
    return [(name, float(drain_s), float(load_s)) for name, drain_s, load_s in found]


async def listed(service: RunningService) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=service.base_url, timeout=30) as client:
        data = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model for model in data}


def greedy(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the output of transformers, token by token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.promise(
    "Models: one worker serves several models in turn, and no job of any is refused or lost"
)
async def test_three_models_on_one_worker_are_all_served(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    redis_url: str,
    namespace: str,
) -> None:
    worker = start_worker(**of_list(models, RUNNER="model", DEVICE="cpu"))
    await worker.ready()
    fronts = frontends(transport)
    with running_frontend(redis_url, namespace) as service:
        found = await until(lambda: listed_all(service), timeout_s=60)
        assert {name: model["status"] for name, model in found.items()} == {
            "one": "served",
            "two": "on_demand",
            "three": "on_demand",
        }
        assert found["one"]["estimated_wait_s"] is None
        assert found["two"]["estimated_wait_s"] > 0
        jobs: list[tuple[str, str]] = []
        for _ in range(4):
            for name in NAMES:
                jobs.append((name, await fronts[name].submit(PROMPT, max_tokens=8)))
        expected = {name: greedy(path, PROMPT, 8) for name, path in models.items()}
        assert len(set(map(tuple, expected.values()))) == 3, "the answers show the model"
        for name, job_id in jobs:
            assert (await fronts[name].result(job_id)).token_ids == expected[name]
    for _, job_id in jobs:
        record = await transport.store.get(job_id)
        assert record is not None
        assert record.attempt == 1
    assert {name for name, *_ in swaps(worker)} >= {"two", "three"}


async def test_a_job_of_a_model_that_nobody_serves_has_its_place_and_an_estimate(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    throttle: Throttle,
    redis_url: str,
    namespace: str,
) -> None:
    bound_s = 600
    await start_worker(**of_list(models, MODEL_SWAP_WAIT_S=bound_s)).ready()
    fronts = frontends(transport)
    throttle.apply(after_tokens=4, step_s=30)
    running = await fronts["one"].submit(PROMPT, max_tokens=8)
    await fronts["one"].num_tokens(running, 4)
    waiting = [await fronts["two"].submit(PROMPT) for _ in range(2)]
    with running_frontend(redis_url, namespace) as service:
        async with httpx.AsyncClient(base_url=service.base_url, timeout=30) as client:

            async def second() -> dict[str, Any] | None:
                job: dict[str, Any] = (await client.get(f"/v1/jobs/{waiting[1]}")).json()
                # An idle worker's estimate is that of a load alone.
                return job if (job.get("estimated_wait_s") or 0) > bound_s / 2 else None

            job = await until(second, timeout_s=60)
    assert (job["status"], job["queue_position"]) == ("queued", 1)
    assert bound_s / 2 < job["estimated_wait_s"] <= bound_s + UNKNOWN_SWAP_S
    throttle.release()


async def listed_all(service: RunningService) -> dict[str, dict[str, Any]] | None:
    found = await listed(service)
    is_complete = set(found) == set(NAMES) and any(m["is_served"] for m in found.values())
    return found if is_complete else None


async def test_a_running_stream_is_never_cut_off_for_a_model_that_waits(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    throttle: Throttle,
) -> None:
    worker = start_worker(**of_list(models, MODEL_SWAP_WAIT_S=0))
    await worker.ready()
    fronts = frontends(transport)
    throttle.apply(after_tokens=4)
    running = await fronts["one"].submit(PROMPT, max_tokens=12)
    await fronts["one"].num_tokens(running, 4)
    waiting = await fronts["two"].submit(PROMPT)
    await until(lambda: "draining: the worker takes no new jobs" in worker.log)
    late = await fronts["one"].submit(PROMPT)  # of the model that is left
    assert await fronts["two"].state(waiting) is JobState.QUEUED
    assert (await fronts["one"].result(running)).token_ids == echo(PROMPT, 12)
    throttle.release()
    record = await transport.store.get(running)
    assert record is not None
    assert (record.attempt, record.deaths) == (1, 0)
    assert (await fronts["two"].result(waiting)).token_ids == echo(PROMPT, 20)
    assert (await fronts["one"].result(late)).token_ids == echo(PROMPT, 20)
    assert [name for name, *_ in swaps(worker)] == ["two", "one"]


async def test_an_idle_worker_loads_the_model_that_a_busy_one_drains_for(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    throttle: Throttle,
) -> None:
    busy = await start_worker(**of_list(models, MODEL_SWAP_WAIT_S=0)).ready()
    fronts = frontends(transport)
    throttle.apply(after_tokens=4)
    running = await fronts["one"].submit(PROMPT, max_tokens=200)
    await fronts["one"].num_tokens(running, 4)
    waiting = await fronts["two"].submit(PROMPT, max_tokens=4)
    await until(lambda: "draining: the worker takes no new jobs" in busy.log)
    third_first = dict(reversed(models.items()))
    idle = await start_worker(**of_list(third_first, MODEL_SWAP_WAIT_S=60)).ready()
    assert (await fronts["two"].result(waiting)).token_ids == echo(PROMPT, 4)
    assert [name for name, *_ in swaps(idle)] == ["two"]
    late = await fronts["one"].submit(PROMPT, max_tokens=4)
    assert (await fronts["one"].result(late)).token_ids == echo(PROMPT, 4)
    record = await transport.store.get(late)
    assert record is not None
    assert record.owner == busy.worker_id, "it serves its model again, beside its running job"
    throttle.release()
    assert (await fronts["one"].result(running)).token_ids == echo(PROMPT, 200)
    assert swaps(busy) == []


async def test_a_worker_killed_in_mid_swap_loses_no_job(
    models: dict[str, Path], transport: RedisTransport, start_worker: StartWorker
) -> None:
    worker = start_worker(**of_list(models))
    await worker.ready()
    fronts = frontends(transport)
    jobs = {name: await fronts[name].submit(PROMPT) for name in ("two", "three")}
    await until(lambda: "loading another model next" in worker.log)
    worker.kill()
    successor = start_worker(**of_list(models))
    for name, job_id in jobs.items():
        assert (await fronts[name].result(job_id)).token_ids == echo(PROMPT, 20)
    assert {name for name, *_ in swaps(successor)} == {"two", "three"}


async def test_the_jobs_of_a_dead_worker_are_continued_by_one_that_serves_another_model(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    throttle: Throttle,
) -> None:
    dies = await start_worker(**of_list(models)).ready()
    fronts = frontends(transport)
    throttle.apply(after_tokens=4, step_s=30)
    job_id = await fronts["one"].submit(PROMPT, max_tokens=12)
    await fronts["one"].num_tokens(job_id, 4)
    other_first = dict(reversed(models.items()))
    other = await start_worker(**of_list(other_first)).ready()
    dies.kill()
    throttle.release()
    assert (await fronts["one"].result(job_id)).token_ids == echo(PROMPT, 12)
    assert "one" in {name for name, *_ in swaps(other)}


async def test_one_of_two_workers_loads_a_model_that_waits(
    models: dict[str, Path], transport: RedisTransport, start_worker: StartWorker
) -> None:
    workers = [start_worker(**of_list(models)) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    front = frontends(transport)["three"]
    for _ in range(4):
        assert (await front.result(await front.submit(PROMPT))).token_ids == echo(PROMPT, 20)
    assert sorted([name for name, *_ in swaps(worker)] for worker in workers) == [[], ["three"]]


async def test_a_model_that_cannot_be_loaded_leaves_the_others_served(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    tmp_path: Path,
    redis_url: str,
    namespace: str,
) -> None:
    async def listed_both(service: RunningService) -> dict[str, dict[str, Any]] | None:
        found = await listed(service)
        return found if len(found) == 2 and found["broken"]["load_failed"] else None

    broken = make_checkpoint(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    of_both = {"one": models["one"], "broken": broken}
    worker = start_worker(**of_list(of_both, RUNNER="model", DEVICE="cpu"))
    await worker.ready()
    waiting = await Frontend(transport.store, "broken").submit(PROMPT)
    await until(lambda: "a model of the list cannot be loaded" in worker.log, timeout_s=60)
    front = frontends(transport)["one"]
    assert len((await front.result(await front.submit(PROMPT, max_tokens=4))).token_ids) == 4
    assert await front.state(waiting) is JobState.QUEUED
    with running_frontend(redis_url, namespace) as service:
        found = await until(lambda: listed_both(service), timeout_s=60)
        assert {name: model["load_failed"] for name, model in found.items()} == {
            "one": False,
            "broken": True,
        }
        assert found["one"]["is_served"]
    (status,) = await transport.registry.workers()
    assert str(status.stats["model_load_error"]).startswith("broken: ")
    assert worker.alive
    assert worker.log.count("a model of the list cannot be loaded") == 1, "it waits before a retry"


async def test_a_stop_during_a_swap_drains_and_ends(
    models: dict[str, Path],
    transport: RedisTransport,
    start_worker: StartWorker,
    throttle: Throttle,
) -> None:
    worker = await start_worker(**of_list(models, MODEL_SWAP_WAIT_S=0)).ready()
    fronts = frontends(transport)
    throttle.apply(after_tokens=4)
    running = await fronts["one"].submit(PROMPT, max_tokens=10)
    await fronts["one"].num_tokens(running, 4)
    waiting = await fronts["two"].submit(PROMPT)
    await until(lambda: "draining: the worker takes no new jobs" in worker.log)
    worker.terminate()
    assert (await fronts["one"].result(running)).token_ids == echo(PROMPT, 10)
    assert await worker.ended() == 0
    assert await fronts["two"].state(waiting) is JobState.QUEUED
    assert swaps(worker) == []


async def test_a_worker_that_an_operator_drains_loads_no_other_model(
    models: dict[str, Path], transport: RedisTransport, start_worker: StartWorker
) -> None:
    worker = await start_worker(**of_list(models, MODEL_SWAP_WAIT_S=0)).ready()
    assert await transport.registry.order(worker.worker_id, Order.DRAIN) is Ordered.OK
    await until(lambda: "an operator ordered the worker to take no new jobs" in worker.log)
    front = frontends(transport)["two"]
    waiting = await front.submit(PROMPT)
    await asyncio.sleep(3 * LOOK_S)
    (status,) = await transport.registry.workers()
    assert status.models == ("one",)
    assert await transport.registry.order(worker.worker_id, Order.SERVE) is Ordered.OK
    assert (await front.result(waiting)).token_ids == echo(PROMPT, 20)
