"""ENGINE=vllm over two processes of vLLM's: answers, failures and ends as over one.

One start of vLLM and one restart for all of it; what has been killed comes last. In float32 the
engine of this project says the same in one process.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.sitecustomize import AMX_CALLS
from tests.support.launched import Launched, is_alive
from tests.support.service_client import ServiceClient, token_ids_of
from tests.support.tool_models import POISON, poisoned_demo
from tests.support.vllm_worker import READY_TIMEOUT_S, own_settings, vllm_settings, with_faults
from worker.runtime.messages import EXIT_RANK_LOST

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

SIZE = 2
NUM_THREADS = 2
END_S = 30.0  # within which all have ended when one has; a busy machine
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["worker", "frontend"]}, "count": {"enum": [1, 20, 300]}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.4},
    "log probabilities": {"temperature": 1.0, "seed": 6, "logprobs": True, "top_logprobs": 3},
    "a JSON schema": {
        "temperature": 0,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}
LONG = {
    "prompt": [(7 * i) % 500 + 5 for i in range(40)],
    "max_tokens": 100,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Services:
    """The same model over two processes of vLLM's, and in one of this project's engine."""

    ranks: ServiceClient
    own: ServiceClient
    amx_calls: Path

    def pids(self) -> list[int]:
        """Of the processes that vLLM has started for its parts of the model."""
        return [p for p in self.ranks.penstock.descendants() if b"VLLM::Worker" in command_of(p)]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    model = {
        "MODEL": str(poisoned_demo(tmp_path_factory.mktemp("model"))),
        "SERVED_MODEL_NAME": "demo",
        "BEAT_INTERVAL_MS": "100",
        "HEALTH_INTERVAL_S": "0.05",
        "NUM_THREADS": str(NUM_THREADS),
        "LOG_FORMAT": "text",
    }
    own, ranks = (tmp_path_factory.mktemp(name) for name in ("own", "ranks"))
    size = {"TENSOR_PARALLEL_SIZE": str(SIZE), "ENGINE_PYTHON": with_faults(ranks)}
    calls = ranks / "amx-calls"
    with (
        Launched(own, own_settings(**model)) as one,
        Launched(
            ranks,
            vllm_settings(**model, **size, PYTHON_FAULTS=json.dumps({AMX_CALLS: str(calls)})),
            READY_TIMEOUT_S,
        ) as two,
        ServiceClient(one) as of_one,
        ServiceClient(two) as of_two,
    ):
        yield Services(of_two, of_one, calls)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def is_busy(worker: dict[str, Any]) -> bool:
    return bool(worker["running"] == 1 and worker["free_blocks"] < worker["total_blocks"])


def answer(service: ServiceClient, body: dict[str, Any]) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is Penstock?"}]
    whole = {"model": "demo", "messages": question, "max_tokens": 40, **body}
    response = service.http.post("/v1/chat/completions", json=whole)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


@pytest.mark.parametrize("name", BODIES)
def test_two_ranks_say_what_one_process_says(services: Services, name: str) -> None:
    assert len(services.pids()) == SIZE
    ranks, own = (answer(each, BODIES[name]) for each in (services.ranks, services.own))
    assert ranks["message"]["content"] == own["message"]["content"] != ""
    assert ranks["finish_reason"] == own["finish_reason"]
    if name == "a JSON schema":
        assert json.loads(own["message"]["content"]).keys() == SCHEMA["properties"].keys()
    if name == "log probabilities":
        theirs, ours = (each["logprobs"]["content"] for each in (ranks, own))
        assert len(ours) > 10
        assert [t["logprob"] for t in theirs] == pytest.approx(
            [t["logprob"] for t in ours], abs=2e-3
        )


def test_a_request_that_is_not_finite_fails_alone(services: Services) -> None:
    before = answer(services.ranks, BODIES["greedy"])
    prompt = {"model": "demo", "max_tokens": 8, "prompt": [*range(5, 75), POISON]}
    failed = services.ranks.http.post("/v1/completions", json=prompt)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "nonfinite_logits"
    assert answer(services.ranks, BODIES["greedy"]) == before
    assert services.ranks.until_idle()["engine_restarts"] == 0


def test_a_request_that_is_left_is_gone_from_all_ranks(services: Services) -> None:
    with services.ranks.stream("/generate", {**LONG, "max_tokens": 1900}) as events:
        for _ in range(5):
            next(events)
        services.ranks.until(lambda: is_busy(services.ranks.worker()), "a running request")
    idle = services.ranks.until_idle()
    assert idle["generated_tokens"] < 1900
    assert idle["engine_restarts"] == 0


def test_each_rank_asks_for_amx_and_has_its_share_of_the_threads(services: Services) -> None:
    calls = dict(line.split() for line in services.amx_calls.read_text().splitlines())
    assert calls == {str(pid): str(NUM_THREADS // SIZE) for pid in services.pids()}


def test_a_stream_goes_on_when_a_rank_is_killed(services: Services) -> None:
    with services.own.stream("/generate", LONG) as events:
        expected = token_ids_of(list(events))
    assert len(expected) == 100
    killed = services.pids()
    with services.ranks.stream("/generate", LONG) as events:
        seen = [next(events) for _ in range(20)]
        os.kill(killed[-1], signal.SIGKILL)
        services.ranks.until(lambda: not any(map(is_alive, killed)), "the end of all ranks", END_S)
        seen += events
    assert token_ids_of(seen) == expected
    assert f"process {killed[-1]}, ended with status -9" in services.ranks.penstock.output
    assert f"status {EXIT_RANK_LOST}: a rank of the model" in services.ranks.penstock.output
    assert services.ranks.worker()["engine_restarts"] == 1
    assert len(services.pids()) == SIZE
    assert not set(services.pids()) & set(killed)


def test_no_rank_outlives_the_engine(services: Services) -> None:
    """The worker ends the whole session of an engine process that has ended."""
    engine, pids = services.ranks.pid_of("worker.runtime"), services.pids()
    assert len(pids) == SIZE
    os.kill(pids[-1], signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    services.ranks.until(lambda: not any(map(is_alive, [engine, *pids])), "the end of all", END_S)


def test_no_rank_outlives_the_worker(services: Services) -> None:
    """The last one here. One that stands still is ended by the kernel alone."""
    services.ranks.until(lambda: len(services.pids()) == SIZE, "all ranks", READY_TIMEOUT_S)
    worker, engine = (services.ranks.pid_of(m) for m in ("worker", "worker.runtime"))
    pids = [worker, engine, *services.pids()]
    os.kill(pids[-1], signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    services.ranks.until(lambda: not any(map(is_alive, pids)), "the end of all", END_S)
