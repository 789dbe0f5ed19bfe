"""What the makers of a checkpoint recommend holds once, on either engine and with either sampler.

vLLM reads generation_config.json by itself where it is let; the frontend has applied it by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.messages import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.launched import Launched
from tests.support.service_client import ServiceClient, token_ids_of
from tests.support.vllm_environment import VARIABLE
from tests.support.vllm_worker import ALIKE, READY_TIMEOUT_S
from worker.llm import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

PENALTY = 1.2
RECOMMENDED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": PENALTY}
NAMES = {"repetition_penalty": "rep_penalty"}  # of a request to /generate
PROMPT = [11, 50, 200, 33, 120, 7]
SEEDS = (3, 4, 5)
MAX_TOKENS = 60
LEAST_TOKENS = 20  # of an answer, in front of its end token
MODELS = """
[[models]]
model = "{checkpoint}"
served_model_name = "own"

[[models]]
model = "{checkpoint}"
served_model_name = "vllm"
engine = "vllm"
vllm_args = {{enforce_eager = true}}

[[models]]
model = "{checkpoint}"
served_model_name = "vllms_sampler"
engine = "vllm"
vllm_sampler = "vllm"
vllm_args = {{enforce_eager = true}}
"""


@dataclass(frozen=True)
class Served:
    client: ServiceClient
    expected: dict[int, list[int]]  # output by seed, of the parameters as recommended

    def tokens(self, model: str, **members: Any) -> list[int]:
        """Returns the output of a request that has no other parameter."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, **members}
        with self.client.stream("/generate", body) as events:
            return token_ids_of(list(events))


def _outputs(checkpoint: Path, **members: Any) -> dict[int, list[int]]:
    """Returns the outputs by seed, from this project's engine without a service."""
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", max_model_len=512)
    params = [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **members) for seed in SEEDS]
    results = llm.generate([PROMPT] * len(SEEDS), params, progress=False)
    return {seed: list(r.token_ids) for seed, r in zip(SEEDS, results, strict=True)}


def _recommend(checkpoint: Path) -> None:
    """Writes generation_config.json: RECOMMENDED, and an end token for each of SEEDS, of which
    config.json has none."""
    outputs = _outputs(checkpoint, **RECOMMENDED, ignore_eos=True).values()
    before = {token for output in outputs for token in output[:LEAST_TOKENS]}
    ends = [next(token for token in output if token not in before) for output in outputs]
    assert len(set(ends)) > 1
    path = checkpoint / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **RECOMMENDED, "eos_token_id": ends}))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("defaults")
    checkpoint = make_checkpoint(directory / "tiny")
    _recommend(checkpoint)
    (directory / "models.toml").write_text(MODELS.format(checkpoint=checkpoint))
    env = {**ALIKE, "MODELS_FILE": "models.toml", "READY_TIMEOUT_S": str(READY_TIMEOUT_S)}
    env["MAX_MODEL_LEN"] = "512"
    if named := os.environ.get(VARIABLE):
        env["ENGINE_PYTHON"] = named  # else the launcher finds what `make vllm` made
    expected = _outputs(checkpoint, **RECOMMENDED)
    with Launched(directory, env, READY_TIMEOUT_S) as penstock, ServiceClient(penstock) as client:
        client.until(lambda: len(client.health()["workers"]) == 3, "three workers", READY_TIMEOUT_S)
        yield Served(client, expected)


@pytest.mark.promise(
    "vLLM: sampling parameters and end tokens that a checkpoint recommends hold for what a request "
    "leaves out, once, as with this project's engine"
)
@pytest.mark.parametrize("model", ["own", "vllm"])
def test_a_request_without_parameters_is_sampled_as_recommended(served: Served, model: str) -> None:
    """Each answer ends at another of the end tokens, which only generation_config.json has."""
    for seed in SEEDS:
        assert served.tokens(model, seed=seed) == served.expected[seed]
        assert LEAST_TOKENS <= len(served.expected[seed]) < MAX_TOKENS
    given = {NAMES.get(name, name): value for name, value in RECOMMENDED.items()}
    assert served.tokens(model, seed=SEEDS[0], **given) == served.expected[SEEDS[0]]


@pytest.mark.parametrize("model", ["vllm", "vllms_sampler"])
def test_a_recommended_penalty_is_applied_once(served: Served, model: str) -> None:
    """Greedy, as vLLM's own sampler draws other numbers."""
    once = served.tokens("own", temperature=0.0)
    for penalty in (1.0, PENALTY**2):  # not at all, or twice
        assert served.tokens("own", temperature=0.0, rep_penalty=penalty) != once
    assert served.tokens(model, temperature=0.0) == once


def test_vllms_sampler_ends_at_every_end_token(served: Served) -> None:
    """Whatever it draws, it has none of them but at the end."""
    ends = {output[-1] for output in served.expected.values()}
    for seed in SEEDS:
        output = served.tokens("vllms_sampler", seed=seed)
        assert not ends & set(output[:-1])
        assert output[-1] in ends or len(output) == MAX_TOKENS
