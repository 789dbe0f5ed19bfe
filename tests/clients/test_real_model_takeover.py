"""SmolLM2 on either engine gives the tokens of this project's, and a job whose worker is killed
ends with them on another worker.

Everything is in float32. The expected tokens are those of LLM, in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import SamplingParams
from tests.support.polling import wait_until
from tests.support.real_model import real_checkpoint
from tests.support.redis_server import new_namespace
from tests.support.service_client import events_of
from tests.support.service_processes import (
    MODEL,
    FrontendProcess,
    WorkerProcess,
    process,
    worker_process,
)
from tests.support.varied_prompts import VARIED_PROMPTS
from tests.support.vllm_worker import ALIKE, READY_TIMEOUT_S, own_settings, vllm_settings
from worker.llm import LLM

pytestmark = [pytest.mark.packages, pytest.mark.timeout(2 * READY_TIMEOUT_S)]

PROMPTS = VARIED_PROMPTS[4:60:7]
MAX_TOKENS = 40
KILLED_AFTER = 10  # tokens
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 3,
    "top_p": 0.95,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
}
SERVED = {"RUNNER": "model", "LEASE_MS": "2000"}


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[int]]:
    """The greedy tokens of each of PROMPTS, and those of the first one when they are drawn."""
    llm = LLM(
        str(real_checkpoint()),
        dtype="float32",
        device="cpu",
        max_model_len=int(ALIKE["MAX_MODEL_LEN"]),
        num_kv_blocks=int(ALIKE["NUM_KV_BLOCKS"]),
    )
    greedy = llm.generate(PROMPTS, SamplingParams(**GREEDY), progress=False)
    (drawn,) = llm.generate(PROMPTS[:1], SamplingParams(**SAMPLED), progress=False)
    return [list(result.token_ids) for result in greedy], list(drawn.token_ids)


@contextmanager
def first_worker(
    redis_url: str, namespace: str, log: Path, settings: Mapping[str, str]
) -> Iterator[tuple[WorkerProcess, FrontendProcess]]:
    """A worker and a frontend, which serve when this is entered."""
    with (
        worker_process(redis_url, namespace, real_checkpoint(), log, **settings) as worker,
        process(redis_url, namespace) as frontend,
    ):
        try:
            wait_until(lambda: frontend.answers("/ready", 200), "readiness", READY_TIMEOUT_S)
        except AssertionError:
            raise AssertionError(log.read_text()) from None
        yield worker, frontend


def tokens_of(frontend: FrontendProcess, prompt: str) -> list[int]:
    body = {"prompt": prompt, **GREEDY, "stream": False}
    answered = httpx.post(f"{frontend.base_url}/generate", json=body, timeout=READY_TIMEOUT_S)
    assert answered.status_code == 200, answered.text
    token_ids: list[int] = answered.json()["token_ids"]
    return token_ids


@pytest.mark.parametrize("engine", ["own", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_tokens_are_the_same_on_the_engine_and_after_its_worker_is_killed(
    redis_url: str,
    tmp_path: Path,
    expected: tuple[list[list[int]], list[int]],
    engine: str,
) -> None:
    greedy, drawn = expected
    namespace = new_namespace()
    settings = vllm_settings(**SERVED) if engine == "vllm" else own_settings(**SERVED)
    with first_worker(redis_url, namespace, tmp_path / "first", settings) as (worker, frontend):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert [*pool.map(lambda prompt: tokens_of(frontend, prompt), PROMPTS)] == greedy
        body = {"model": MODEL, "prompt": PROMPTS[0], **SAMPLED, "stream": True}
        with httpx.stream(
            "POST", f"{frontend.base_url}/generate", json=body, timeout=READY_TIMEOUT_S
        ) as response:
            assert response.status_code == 200, response.read()
            events = events_of(response.iter_lines())
            token_ids: list[int] = []
            while len(token_ids) < KILLED_AFTER:
                token_ids += (next(events).payload or {})["token_ids"]
            worker.kill()
            assert len(token_ids) < MAX_TOKENS
            second = own_settings(**SERVED)
            with worker_process(
                redis_url, namespace, real_checkpoint(), tmp_path / "second", **second
            ):
                for event in events:
                    token_ids += (event.payload or {"token_ids": []})["token_ids"]
        assert token_ids == drawn
        job_id = response.headers["x-request-id"].removeprefix("gen-")
        job = httpx.get(f"{frontend.base_url}/v1/jobs/{job_id}", timeout=READY_TIMEOUT_S).json()
        assert job["attempt"] == 2
