"""Quantised checkpoints, and models whose layers are not all alike, through vLLM on a CPU.

What a quantised checkpoint says is compared with its twin of dequantised weights: as long as the
twin is sure of a token, it is the same. What vLLM's CPU build cannot run is refused by a sentence.
All are loaded one after the other into one process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.messages import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.greedy_reference import GreedyReference, greedy_reference
from tests.support.quantised_checkpoints import FORMATS, make_quantised
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.support.vllm_models import TIMEOUT_S, Model, Work, run_models, vllm_options
from tests.support.vllm_runs import Answer, VllmRequest
from worker.engine_options import EngineOptions
from worker.model.cpu.processor import cpu_features

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TIMEOUT_S + 60)]

NUM_TOKENS = 16
TOP = 2
PROMPTS = tuple(
    tuple(map(int, np.random.default_rng(length).integers(0, 380, length)))
    for length in (1, 5, 17, 40)
)
# The largest difference of log probabilities, and of the two best where the token may differ, that
# rounding explains: of bfloat16 alone (0.156 seen where products are computed by AMX), and of
# activations of eight bits too.
ROUNDING = {False: 0.25, True: 0.4}
# Windows, experts, soft caps and sinks; the widths are those that its kernels for CPUs have.
_WIDE = {"hidden_size": 128, "head_dim": 32}
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "mistral": _WIDE,
    "qwen3_moe": _WIDE,
    "gemma3_text": _WIDE,
    "gpt_oss": {**_WIDE, "head_dim": 64},
}
# What this build of vLLM has no kernel for, with a word of its reason.
REFUSED = {"fp8": "fp8"}
if "amx_tile" not in cpu_features():
    REFUSED["fp8-blocks"] = "AMX"


def options_of(checkpoint: Path, dtype: str) -> EngineOptions:
    return vllm_options(checkpoint, dtype, '{"enforce_eager": true}')


def greedy_requests(prompts: Any = PROMPTS) -> list[VllmRequest]:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP, seed=1
    )
    return [VllmRequest(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, GreedyReference]]:
    """Checkpoints of MODEL_TYPES, and what transformers says to some prompts."""
    folder = tmp_path_factory.mktemp("types")
    tokenizer = make_checkpoint(folder / "tokenizer", vocab_size=VOCAB_SIZE)
    made = {}
    for name, members in MODEL_TYPES.items():
        path = write_tiny_model(folder / name, name, **members)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, path)
        made[name] = path, greedy_reference(path, torch.device("cpu"), attention="eager")
    return made


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    references: dict[str, tuple[Path, GreedyReference]],
) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("quantised")
    models = {
        name: Work(options_of(path, "float32"), [greedy_requests(reference.prompts)])
        for name, (path, reference) in references.items()
    }
    for name, format in FORMATS.items():
        checkpoint, twin = make_quantised(folder, format)
        models[name] = Work(options_of(checkpoint, "bfloat16"), [greedy_requests()])
        if name not in REFUSED:
            models[f"{name}-twin"] = Work(options_of(twin, "bfloat16"), [greedy_requests()])
    results = run_models(models, folder)
    shutil.rmtree(folder)
    return results


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_model_type_gives_transformers_tokens(
    found: dict[str, Model],
    references: dict[str, tuple[Path, GreedyReference]],
    name: str,
) -> None:
    _, reference = references[name]
    assert len(reference.prompts) >= 8
    assert found[name].refusal == ""
    answers = [found[name].answers[str(i)].token_ids for i in range(len(reference.prompts))]
    assert answers == [output[:NUM_TOKENS] for output in reference.outputs]
    assert len({token for tokens in answers for token in tokens}) > 40, "they say little"


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in REFUSED])
def test_a_quantised_checkpoint_says_what_its_weights_stand_for(
    found: dict[str, Model], name: str
) -> None:
    mine, twin = found[name], found[f"{name}-twin"]
    assert (mine.refusal, twin.refusal) == ("", "")
    rounding = ROUNDING[FORMATS[name].quantises_activations]
    num_compared = sum(
        agreeing_tokens(mine.answers[key], twin.answers[key], rounding) for key in twin.answers
    )
    assert num_compared > len(PROMPTS) * NUM_TOKENS / 3, "they part too early to show anything"


def agreeing_tokens(answer: Answer, twin: Answer, rounding: float) -> int:
    """Returns how many tokens are the same from the start.

    AssertionError where one differs of which the twin was sure, or log probabilities are far apart.
    """
    for at, (mine, other) in enumerate(zip(answer.logprobs, twin.logprobs, strict=True)):
        (_, best), (_, second) = other.top[:2]
        if answer.token_ids[at] != twin.token_ids[at]:
            assert best - second < rounding, (at, answer.token_ids, twin.token_ids)
            return at
        assert abs(mine.logprob - other.logprob) < rounding, (at, mine, other)
    return NUM_TOKENS


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_without_a_kernel_is_refused_by_a_sentence(
    found: dict[str, Model], name: str
) -> None:
    refusal = found[name].refusal
    assert refusal.startswith("vLLM cannot serve this model: ")
    assert REFUSED[name] in refusal
    assert "\n" not in refusal
