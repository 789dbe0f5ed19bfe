"""ENGINE=vllm over two processes of vLLM's says what the engine of this project says in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Launched
from tests.support.service_client import ServiceClient
from tests.support.tool_models import poisoned_demo
from tests.support.vllm_worker import READY_TIMEOUT_S, own_settings, vllm_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

SIZE = 2
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
        "temperature": 1.0,
        "seed": 7,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}


@dataclass(frozen=True)
class Services:
    """The same model over two processes of vLLM's, and in one of this project's engine."""

    ranks: ServiceClient
    own: ServiceClient

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
        "NUM_THREADS": "2",
    }
    own, ranks = (tmp_path_factory.mktemp(name) for name in ("own", "ranks"))
    with (
        Launched(own, own_settings(**model)) as one,
        Launched(
            ranks, vllm_settings(**model, TENSOR_PARALLEL_SIZE=str(SIZE)), READY_TIMEOUT_S
        ) as two,
        ServiceClient(one) as of_one,
        ServiceClient(two) as of_two,
    ):
        yield Services(of_two, of_one)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


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
    if name == "log probabilities":
        theirs, ours = (each["logprobs"]["content"] for each in (ranks, own))
        assert len(ours) > 10
        assert [t["logprob"] for t in theirs] == pytest.approx(
            [t["logprob"] for t in ours], abs=2e-3
        )
