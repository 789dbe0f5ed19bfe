"""Workers with vLLM break, leave and lack memory: their streams say what they would have said.

What they would have said is what this project's engine says to the same requests, in float32. Where
a job moves from one engine to the other, its reader cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.cores import available_cores
from shared.messages import SamplingParams
from shared.text.grammar import json_schema_grammar
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.scenario import Scenario
from tests.support.busy_neighbours import busy_neighbours
from tests.support.faults.sitecustomize import POISON_TOKEN, TRAP
from tests.support.jobs import accepted, make_job
from tests.support.polling import until
from tests.support.vllm_worker import READY_TIMEOUT_S, own_settings, vllm_settings, with_faults
from worker.llm import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * READY_TIMEOUT_S)]

ROUNDS = 5
NUM_BLOCKS = 32
SERVED = {"RUNNER": "model", "MAX_MODEL_LEN": "512", "NUM_KV_BLOCKS": str(NUM_BLOCKS)}
MAX_TOKENS = 240  # of all requests together: more blocks than there are
AFTER_TOKENS = 15
FEW_STEPS = 15
STARVED_STALL_S = 5
ROWS = {"type": "array", "items": {"enum": ["up", "down", 7, None]}, "minItems": 60, "maxItems": 90}
Request = tuple[tuple[int, ...], dict[str, Any]]  # prompt, members of SamplingParams
REQUESTS: tuple[Request, ...] = (
    ((11, 50, 200, 33), {"temperature": 0.0}),
    ((90, 91, 92), {"temperature": 0.9, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.2}),
    ((120, 7, 300, 301, 302), {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.3}),
    ((44, 45), {"temperature": 1.0, "seed": 3, "grammar": json_schema_grammar(ROWS, "schema")}),
    ((46, 47, 48), {"temperature": 1.0, "seed": 9, "top_k": 50, "logit_bias": {5: 1.5}}),
)


def _params(sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos="grammar" not in sampling, **{"seed": 1, **sampling}
    )


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("vllm")
    made = Deployment(directory, checkpoint)
    settings = vllm_settings(ENGINE_PYTHON=with_faults(directory), **SERVED, **{TRAP: "1"})
    made.change_usual(num_workers=1, **settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The output of each of REQUESTS, from this project's engine."""
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", max_model_len=512)
    prompts, samplings = zip(*REQUESTS, strict=True)
    results = llm.generate(prompts, [*map(_params, samplings)], progress=False)
    return [list(result.token_ids) for result in results]


async def _begin(scenario: Scenario, requests: Sequence[Request] = REQUESTS) -> list[Client]:
    """Queues the requests and begins to read them."""
    clients = []
    for prompt, sampling in requests:
        job = make_job(
            prompt=prompt,
            model=scenario.deployment.model,
            sampling=_params(sampling),
            timeout_ms=int(READY_TIMEOUT_S * 1000),
        )
        job_id = await accepted(scenario.transport.store, job)
        clients.append(scenario.reader_of(job_id, list(prompt), MAX_TOKENS))
    return clients


async def _all_said(clients: Sequence[Client], expected: Sequence[Sequence[int]]) -> None:
    """Every stream has brought what was expected, each token once."""
    for client, tokens in zip(clients, expected, strict=True):
        reading = await client.ended(READY_TIMEOUT_S)
        assert reading.finished, reading.ends or reading.refusal
        assert reading.token_ids == list(tokens)


async def _have_moved(scenario: Scenario, clients: Sequence[Client], attempt: int) -> bool:
    attempts = [int((await scenario.job(c.reading.job_id))["attempt"]) for c in clients]
    assert min(attempts) == attempt, attempts
    return True


def _figures(scenario: Scenario) -> dict[str, Any]:
    """What the one worker said last."""
    (worker,) = httpx.get(f"{scenario.deployment.urls()[0]}/health").json()["workers"]
    return dict(worker)


@pytest.mark.promise(
    "vLLM: preemption in vLLM loses nothing; a cancelled job frees its blocks within a few steps"
)
async def test_requests_that_wait_for_blocks_lose_nothing(
    scenario: Scenario, expected: list[list[int]]
) -> None:
    """vLLM preempts some of them: it computes them again, from the blocks that others leave."""
    before = _figures(scenario)["preemptions"]
    for _ in range(ROUNDS):  # a worker that starts them one by one may have blocks for each
        await _all_said(await _begin(scenario), expected)
        if (await _idle(scenario))["preemptions"] > before:
            break
    else:
        pytest.fail(f"no preemption in {ROUNDS} rounds")
    await scenario.settled()


async def test_a_cancelled_job_frees_its_blocks_within_a_few_steps(scenario: Scenario) -> None:
    before = (await _idle(scenario))["generated_tokens"]
    (client,) = scenario.clients(1, 450, ignore_eos=True)
    async with scenario.middle_of([client], AFTER_TOKENS):
        await until(lambda: _figures(scenario)["free_blocks"] < NUM_BLOCKS, "blocks in use")
        async with httpx.AsyncClient(base_url=scenario.deployment.urls()[1]) as http:
            answer = (await http.delete(f"/v1/jobs/{client.reading.job_id}")).json()
        after = (await _idle(scenario))["generated_tokens"]
    assert after - before - answer["usage"]["completion_tokens"] <= FEW_STEPS
    await scenario.settled()


async def _idle(scenario: Scenario) -> dict[str, Any]:
    """The one worker's figures, once all its blocks are free."""

    def figures() -> dict[str, Any] | None:
        figures = _figures(scenario)
        is_idle = figures["free_blocks"] == NUM_BLOCKS and not figures["running"]
        return figures if is_idle else None

    return dict(await until(figures, "an idle engine"))


@pytest.mark.promise(
    "vLLM: a stream whose vLLM is killed, or whose worker leaves for another vLLM or for this "
    "project's engine, has the text of an uninterrupted one"
)
async def test_streams_of_a_killed_engine_go_on(
    scenario: Scenario, expected: list[list[int]]
) -> None:
    clients = await _begin(scenario)
    async with scenario.middle_of(clients, AFTER_TOKENS):
        (worker,) = scenario.deployment.workers
        worker.kill_engine()
    await _all_said(clients, expected)
    assert _figures(scenario)["engine_restarts"] == 1
    await scenario.settled()


async def test_jobs_move_to_another_vllm_and_on_to_the_other_engine(
    scenario: Scenario, expected: list[list[int]]
) -> None:
    deployment = scenario.deployment
    (first,) = deployment.workers
    clients = await _begin(scenario)
    async with scenario.middle_of(clients, AFTER_TOKENS, step_s=1.0):
        second = await deployment.start_worker().ready()
        await deployment.replaced(first)
        await until(lambda: _have_moved(scenario, clients, 2), "all jobs at the second worker")
        own = own_settings(**SERVED, ENGINE_PYTHON="", VLLM_ARGS="")
        await deployment.start_worker(**own).ready()
        await deployment.replaced(second)
    await _all_said(clients, expected)
    assert await _have_moved(scenario, clients, 3)
    await scenario.settled()


async def test_the_first_scored_prompt_compiles_nothing_in_a_starved_engine(
    scenario: Scenario, expected: list[list[int]], tmp_path: Path
) -> None:
    """vLLM compiles its ranks of log probabilities at first use: for 9 s of a core, four times as
    long here, in a step. What it compiled before is not there."""
    deployment = scenario.deployment
    settings = {"XDG_CACHE_HOME": tmp_path, "STALL_LIMIT_S": STARVED_STALL_S}
    (worker,) = await deployment.use_workers(1, **settings)
    engine_pid = worker.engine_pid()
    neighbours = await _begin(scenario)
    body = {"model": deployment.model, "prompt": [5, 6, 7, 8], "max_tokens": 1}
    async with (
        scenario.middle_of(neighbours, AFTER_TOKENS),
        httpx.AsyncClient(base_url=deployment.urls()[0], timeout=READY_TIMEOUT_S) as http,
    ):
        with busy_neighbours(3 * available_cores()):
            scored = await http.post("/v1/completions", json={**body, "echo": True, "logprobs": 2})
    assert scored.status_code == 200, scored.text
    assert len(scored.json()["choices"][0]["logprobs"]["token_logprobs"]) == 5
    await _all_said(neighbours, expected)
    assert (worker.engine_pid(), _figures(scenario)["engine_restarts"]) == (engine_pid, 0)
    await scenario.settled()


@pytest.mark.promise(
    "vLLM: a job that kills vLLM again and again ends as `poison`, its neighbours finish (in `make "
    "chaos`)"
)
@pytest.mark.long
async def test_a_poison_job_ends_and_its_neighbours_finish(
    scenario: Scenario, expected: list[list[int]]
) -> None:
    clients = await _begin(scenario, REQUESTS[:2])
    async with scenario.middle_of(clients, AFTER_TOKENS):
        prompt = [POISON_TOKEN, 5, 6]
        job_id = await scenario.submit(prompt, 20, timeout_ms=int(READY_TIMEOUT_S * 1000))
        reading = await scenario.reader_of(job_id, prompt, 20).ended(READY_TIMEOUT_S)
    assert (reading.error_code, reading.num_tokens) == ("poison", 0)
    await _all_said(clients, expected[:2])
    await scenario.settled()
