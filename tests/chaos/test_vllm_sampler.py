"""Where vLLM's own sampler draws, a stream that is cut goes on with other tokens, and that is said.

It still ends once, keeps what was sent, and has each token once. What needs no random number
(greedy output) stays what it would have been.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import SamplingParams
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until
from tests.support.vllm_worker import READY_TIMEOUT_S, own_settings, vllm_settings, with_faults
from worker.llm import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * READY_TIMEOUT_S)]

SERVED = {"RUNNER": "model", "MAX_MODEL_LEN": "512"}
PROMPT = [11, 50, 200, 33]
MAX_TOKENS = 120
AFTER_TOKENS = 15
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("sampler")
    made = Deployment(directory, checkpoint)
    settings = vllm_settings(
        ENGINE_PYTHON=with_faults(directory), VLLM_SAMPLER="vllm", STALL_LIMIT_S="60", **SERVED
    )
    made.change_usual(num_workers=1, **settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> list[int]:
    """The greedy output, from this project's engine."""
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", max_model_len=512)
    params = SamplingParams(max_tokens=MAX_TOKENS, **GREEDY)
    (result,) = llm.generate([PROMPT], params, progress=False)
    return list(result.token_ids)


def _get(scenario: Scenario, path: str) -> dict[str, Any]:
    answer = httpx.get(f"{scenario.deployment.urls()[0]}{path}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _says(scenario: Scenario, engine: str, *, exact: bool) -> bool:
    """Whether the model is said to have this engine; what it says of itself is checked."""
    model = _get(scenario, f"/v1/models/{scenario.deployment.model}")
    assert model in _get(scenario, "/v1/models")["data"]
    assert (model["engine"], model["exact_resume"]) == (engine, exact)
    return True


def _of_workers(scenario: Scenario) -> dict[str, int]:
    workers = _get(scenario, "/health")["workers"]
    return {worker["engine"]: worker["exact_resume"] for worker in workers}


def _begin(scenario: Scenario, **sampling: Any) -> Client:
    return scenario.client(MAX_TOKENS, prompt=PROMPT, resumes=True, **sampling)


async def _ended(client: Client) -> list[int]:
    """The tokens of a stream that has brought all of them. Its reader has seen that each event is
    where the one before it has ended, and nothing behind the end."""
    reading = await client.ended(READY_TIMEOUT_S)
    assert reading.finished, reading.ends or reading.refusal
    assert (len(reading.ends), reading.num_tokens) == (1, MAX_TOKENS)
    assert all(a.num_tokens < b.num_tokens for a, b in pairwise(reading.cursors))
    return reading.token_ids


def _job(scenario: Scenario, client: Client) -> dict[str, Any]:
    return _get(scenario, f"/v1/jobs/gen-{client.reading.job_id}")


@pytest.mark.promise(
    "vLLM: an output that is cut continues as if it had not been; where it does not, the model and "
    "its jobs report it"
)
async def test_a_cut_stream_keeps_what_was_sent_and_goes_on_with_other_tokens(
    scenario: Scenario, greedy: list[int]
) -> None:
    await until(lambda: _says(scenario, "vllm", exact=False), "the engine in /v1/models")
    assert _of_workers(scenario) == {"vllm": 0}
    whole = await _ended(_begin(scenario, **SAMPLED))
    assert await _ended(_begin(scenario, **SAMPLED)) == whole  # on the same vLLM, undisturbed
    clients = [_begin(scenario, **SAMPLED), _begin(scenario, **GREEDY)]
    async with scenario.middle_of(clients, AFTER_TOKENS):
        job = _job(scenario, clients[0])
        assert (job["attempt"], job["exact_resume"]) == (1, False)
        sent = list(clients[0].reading.token_ids)
        (worker,) = scenario.deployment.workers
        worker.kill_engine()
    sampled, undrawn = [await _ended(client) for client in clients]
    assert sampled[: len(sent)] == sent == whole[: len(sent)]
    assert sampled != whole
    assert undrawn == greedy
    job = _job(scenario, clients[0])
    assert (job["attempt"], job["exact_resume"]) == (2, False)
    await scenario.settled()


async def test_a_model_on_both_samplers_makes_the_weaker_promise(
    scenario: Scenario, greedy: list[int]
) -> None:
    deployment = scenario.deployment
    (vllm,) = deployment.workers
    clients = [_begin(scenario, **SAMPLED), _begin(scenario, **GREEDY)]
    async with scenario.middle_of(clients, AFTER_TOKENS, step_s=1.0):
        before = list(clients[0].reading.token_ids)
        others = {"ENGINE_PYTHON": "", "VLLM_ARGS": "", "VLLM_SAMPLER": "auto"}
        own = await deployment.start_worker(**own_settings(**SERVED, **others)).ready()
        await until(lambda: _says(scenario, "mixed", exact=False), "both engines in /v1/models")
        both = {"vllm": 0, "penstock": 1}
        await until(lambda: _of_workers(scenario) == both, "both workers in /health")
        assert _job(scenario, clients[0])["exact_resume"] is False
        await deployment.replaced(vllm)
        await until(lambda: _says(scenario, "penstock", exact=True), "one engine in /v1/models")
    sampled, undrawn = [await _ended(client) for client in clients]
    assert sampled[: len(before)] == before
    assert undrawn == greedy
    assert {_job(scenario, client)["worker"] for client in clients} == {own.worker_id}
    # It is said of the workers that the model has now.
    assert _job(scenario, clients[0])["exact_resume"] is True
    await scenario.settled()
