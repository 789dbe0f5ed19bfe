"""LoRA adapters by name, on workers with vLLM that break and leave: each says what its merged
weights say on this project's engine, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from shared.messages import SamplingParams
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.scenario import Scenario
from tests.support.jobs import accepted, make_job
from tests.support.lora_adapters import write_adapter, write_merged
from tests.support.polling import until
from tests.support.vllm_worker import READY_TIMEOUT_S, vllm_settings, with_faults
from worker.llm import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * READY_TIMEOUT_S)]

MAX_TOKENS = 200
AFTER_TOKENS = 15
PROMPTS = ((11, 50, 200, 33), (90, 91, 92))
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(
    max_tokens=MAX_TOKENS,
    temperature=0.8,
    top_p=0.9,
    frequency_penalty=0.2,
    ignore_eos=True,
    seed=7,
)
Expected = Mapping[str, list[list[int]]]  # by model: the output of each of PROMPTS


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, checkpoint, seed=seed)
        for seed, name in enumerate(("ann", "team/bob"))
    }


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, adapters: dict[str, Path]
) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("vllm")
    made = Deployment(directory, checkpoint)
    settings = {
        "ENGINE_PYTHON": with_faults(directory),
        "RUNNER": "model",
        "MAX_MODEL_LEN": "512",
        "LORA_MODULES": ",".join(f"{name}={path}" for name, path in adapters.items()),
    }
    made.change_usual(num_workers=1, **vllm_settings(**settings))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, adapters: dict[str, Path]
) -> Expected:
    folder = tmp_path_factory.mktemp("merged")
    merged = {
        name: write_merged(folder / path.name, checkpoint, path) for name, path in adapters.items()
    }
    said = {}
    for name, path in {checkpoint.name: checkpoint, **merged}.items():
        llm = LLM(str(path), dtype="float32", device="cpu", max_model_len=512)
        results = llm.generate([*PROMPTS], [GREEDY, SAMPLED], progress=False)
        said[name] = [list(result.token_ids) for result in results]
    return said


async def _begin(scenario: Scenario, expected: Expected) -> list[Client]:
    """Queues each prompt for each model and begins to read all."""
    clients = []
    for model in expected:
        for prompt, sampling in zip(PROMPTS, (GREEDY, SAMPLED), strict=True):
            timeout_ms = int(READY_TIMEOUT_S * 1000)
            job = make_job(
                prompt=prompt,
                model=model,
                sampling=sampling,
                timeout_ms=timeout_ms,
                adapter="" if model == scenario.deployment.model else model,
            )
            job_id = await accepted(scenario.transport.store, job)
            clients.append(scenario.reader_of(job_id, list(prompt), MAX_TOKENS))
    return clients


async def _all_said(clients: list[Client], expected: Expected) -> None:
    wanted = [output for outputs in expected.values() for output in outputs]
    for client, output in zip(clients, wanted, strict=True):
        reading = await client.ended(READY_TIMEOUT_S)
        assert reading.finished, reading.ends or reading.refusal
        assert reading.token_ids == output


@pytest.mark.promise(
    "vLLM: requests name a LoRA adapter as their model, and models list its parent"
)
async def test_adapters_are_models(
    scenario: Scenario, expected: Expected, adapters: dict[str, Path]
) -> None:
    base = scenario.deployment.model
    async with httpx.AsyncClient(
        base_url=scenario.deployment.urls()[0], timeout=READY_TIMEOUT_S
    ) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        parents = {model["id"]: model["parent"] for model in listed}
        assert parents == {base: None, **dict.fromkeys(adapters, base)}
        assert all(model["is_served"] for model in listed)
        for model, outputs in expected.items():
            body = {
                "model": model,
                "prompt": list(PROMPTS[0]),
                "max_tokens": MAX_TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["model"] == model
            assert answer["choices"][0]["token_ids"] == outputs[0]
        unknown = await http.post("/v1/completions", json={**body, "model": "ann2"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        metrics = (await http.get("/metrics")).text
    assert 'model_name="team/bob"' in metrics, "requests are counted by the adapter's name"
    await scenario.settled()


@pytest.mark.promise(
    "vLLM: a stream of a LoRA adapter whose engine is killed, or whose worker leaves, has the text "
    "of an uninterrupted one"
)
async def test_streams_of_adapters_survive_their_engine_and_their_worker(
    scenario: Scenario, expected: Expected
) -> None:
    deployment = scenario.deployment
    (first,) = deployment.workers
    clients = await _begin(scenario, expected)
    async with scenario.middle_of(clients, AFTER_TOKENS, step_s=1.0):
        second = await deployment.start_worker().ready()
        await deployment.replaced(first)

        async def have_moved() -> bool:
            jobs = [await scenario.job(client.reading.job_id) for client in clients]
            return all(int(job["attempt"]) >= 2 for job in jobs)

        await until(have_moved, "all jobs to be at the second worker")
        second.kill_engine()
    await _all_said(clients, expected)
    jobs = [await scenario.job(client.reading.job_id) for client in clients]
    assert min(int(job["attempt"]) for job in jobs) == 3
    digests = {job["model"]: job["weights_digest"] for job in jobs}
    assert len({*digests.values()}) == len(expected), "each adapter has its own"
    await scenario.settled()
