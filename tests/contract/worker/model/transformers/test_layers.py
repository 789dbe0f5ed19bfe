"""Attention modules and decoder layers of transformers that are computed in fewer calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.messages import SamplingParams
from tests.bench.forward_steps import prefill
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model
from worker.model.transformers.attention import AttentionMismatch
from worker.model.transformers.layers import ShortAttention, ShortLayer

SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
PROMPTS = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (2, 17, 40, 64)]


def build(path: Path) -> BuiltModel:
    return build_model(
        EngineOptions(
            checkpoint=str(path),
            model_impl="transformers",
            device="cpu",
            dtype="bfloat16",
            cpu_tier="native",
            block_size=16,
            num_kv_blocks=64,
            max_num_batched_tokens=23,
            num_threads=2,
        )
    )


def network_of(built: BuiltModel) -> Any:
    return built.runner._model.network  # type: ignore[attr-defined]


def layers_of(built: BuiltModel) -> list[ShortLayer]:
    forwards = [module.forward for module in network_of(built).modules()]
    return [forward for forward in forwards if isinstance(forward, ShortLayer)]


def runs_of(built: BuiltModel) -> list[int]:
    """The lengths of the runs of layers, in their order."""
    runs = [layer._run for layer in layers_of(built) if layer._is_first]
    return [len(run.native) for run in runs if run is not None]


@pytest.mark.parametrize(
    ("model_type", "members", "attentions", "layers", "runs"),
    [
        ("mistral", {}, 3, 3, [3]),
        ("phi3", {}, 3, 3, [3]),
        ("qwen3", {}, 3, 3, [3]),
        # The rotations of its layers differ: local, global, local.
        ("gemma3_text", {}, 3, 3, [1, 1, 1]),
        ("qwen3_moe", {}, 3, 3, []),
        # A norm over all heads, and behind the parts only.
        ("olmo2", {}, 0, 0, []),
        # What is added is multiplied first.
        ("granite", {}, 3, 0, []),
        ("granite", {"residual_multiplier": 1.0}, 3, 3, [3]),
        # Not every layer rotates; layers that do follow each other.
        ("smollm3", {"no_rope_layers": [0, 1, 1]}, 2, 2, [2]),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, 2, 2, [1, 1]),
        # Its cosines are float32.
        ("olmo", {}, 0, 0, []),
        # Its rotation is of neighbours, or of a part of a head.
        ("glm4", {}, 0, 0, []),
        ("deepseek_v3", {}, 0, 0, []),
    ],
)
def test_only_modules_that_compute_what_their_names_say_are_taken(
    model_type: str,
    members: dict[str, Any],
    attentions: int,
    layers: int,
    runs: list[int],
    tmp_path: Path,
) -> None:
    built = build(write_tiny_model(tmp_path, model_type, **members))
    kinds = Counter(type(module.forward) for module in network_of(built).modules())
    assert (kinds[ShortAttention], kinds[ShortLayer]) == (attentions, layers)
    assert runs_of(built) == runs


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "qwen3", "gemma3_text"])
def test_layers_of_one_call_give_what_their_parts_give(model_type: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, model_type)
    built = build(path)
    together = generate(new_engine(built), PROMPTS, SCORED)
    apart = build(path)
    for layer in layers_of(apart):
        layer._run = None
    one_by_one = generate(new_engine(apart), PROMPTS, SCORED)
    for one, other in zip(together, one_by_one, strict=True):
        assert [e.logprob for e in one.prompt_logprobs] == [
            e.logprob for e in other.prompt_logprobs
        ]


def test_a_change_between_layers_of_one_call_is_an_error(tmp_path: Path) -> None:
    built = build(write_tiny_model(tmp_path, "mistral"))
    second = network_of(built).model.layers[1]

    def add(module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0] + 1, *args[1:]

    second.register_forward_pre_hook(add)
    with pytest.raises(AttentionMismatch, match="not given what the layer before"):
        built.runner.launch(ScheduledBatch((prefill(3),))).collect()


def test_the_caller_keeps_what_it_gives_to_a_layer(tmp_path: Path) -> None:
    built = build(write_tiny_model(tmp_path, "gemma3_text"))
    first = network_of(built).model.layers[0]
    seen: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, args: seen.extend((args[0], args[0].clone())))
    built.runner.launch(ScheduledBatch((prefill(3),))).collect()
    given, before = seen
    torch.testing.assert_close(given, before, rtol=0.0, atol=0.0)
