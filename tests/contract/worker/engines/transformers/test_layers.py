"""Attention modules and decoder layers of transformers that are computed in fewer calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.forward_steps import prefill
from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions
from worker.engines.transformers.attention import AttentionMismatch, Rotations
from worker.engines.transformers.layers import ShortAttention, ShortLayer
from worker.model.build import BuiltModel, build_model
from worker.model.cpu.native_layers import NativeLayers

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


class Counted:
    """Layers of one call that count their calls."""

    def __init__(self, native: NativeLayers, copy_rows: int) -> None:
        self.copy_rows = copy_rows
        self.num_rows: list[int] = []
        self._native = native

    def __len__(self) -> int:
        return len(self._native)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        self.num_rows.append(len(x))
        return self._native(x, *args)


def counted(built: BuiltModel, copy_rows: int = 0) -> Counted:
    """Replaces the layers of a model that has them all in one call."""
    runs = {id(layer._run): layer._run for layer in layers_of(built)}
    (run,) = runs.values()
    assert run is not None
    replacement = Counted(run.native, copy_rows)
    run.native = replacement  # type: ignore[assignment]
    return replacement


def step(built: BuiltModel, num_rows: int) -> list[int]:
    """Returns the tokens that a prompt of so many rows is followed by."""
    row = prefill(num_rows, num_groups=len(built.engine_config.windows))
    result = built.runner.launch(ScheduledBatch((row,))).collect()
    return list(result.token_ids.values())


def test_many_rows_are_computed_layer_by_layer(tmp_path: Path) -> None:
    """Where that takes another product than the kernels'."""
    built = build(write_tiny_model(tmp_path, "mistral"))
    native = counted(built, copy_rows=9)
    for num_rows in (8, 9, 10, 3):
        step(built, num_rows)
    assert native.num_rows == [8, 3]
    native.copy_rows = 0
    step(built, 10)
    assert native.num_rows == [8, 3, 10]


def test_a_step_leaves_no_result_to_the_next(tmp_path: Path) -> None:
    """Neither one that came to its end nor one that was broken off, after which the layers may be
    computed one by one."""
    built = build(write_tiny_model(tmp_path, "mistral"))
    counted(built, copy_rows=9)
    runs = [layer._run for layer in layers_of(built)]
    expected = [step(built, num_rows) for num_rows in (12, 3)]
    assert [run.result for run in runs if run] == [None] * 3

    def break_off(*_: object) -> None:
        raise RuntimeError("broken off")

    broken = network_of(built).model.layers[1].register_forward_pre_hook(break_off)
    with pytest.raises(RuntimeError, match="broken off"):
        step(built, 3)
    broken.remove()
    assert [step(built, num_rows) for num_rows in (12, 3)] == expected


def test_a_change_between_layers_of_one_call_is_an_error(tmp_path: Path) -> None:
    built = build(write_tiny_model(tmp_path, "mistral"))
    second = network_of(built).model.layers[1]

    def add(module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0] + 1, *args[1:]

    second.register_forward_pre_hook(add)
    with pytest.raises(AttentionMismatch, match="not given what the layer before"):
        built.runner.launch(ScheduledBatch((prefill(3),))).collect()


@pytest.mark.parametrize("is_one_call", [True, False])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "qwen3_moe"])
def test_the_caller_keeps_what_it_gives_to_a_layer(
    model_type: str, is_one_call: bool, tmp_path: Path
) -> None:
    built = build(write_tiny_model(tmp_path, model_type))
    for layer in layers_of(built) if not is_one_call else ():
        layer._run = None
    seen: list[Tensor] = []
    for module in network_of(built).model.layers:
        module.register_forward_pre_hook(lambda _, args: seen.extend((args[0], args[0].clone())))
    step(built, 3)
    assert len(seen) == 6
    for given, before in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(given, before, rtol=0.0, atol=0.0)


def test_two_rotations_of_one_step_are_converted_once_each() -> None:
    rotations = Rotations()
    angles = [torch.rand(1, 5, 4).repeat(1, 1, 2) for _ in range(3)]
    given = [(angle.cos(), angle.sin()) for angle in angles]
    halves = [rotations.of(one) for one in given[:2]]
    for angle, (cos, sin) in zip(angles, halves, strict=False):
        torch.testing.assert_close(cos[:, 0], angle[0, :, :4].cos())
        torch.testing.assert_close(sin[:, 0], angle[0, :, :4].sin())
    for one, (cos, sin) in zip(given, halves, strict=False):
        assert rotations.of(one)[0] is cos
        assert rotations.of(one)[1] is sin
    rotations.of(given[2])  # of the next step: one of those before is given up
    assert len(rotations._known) == 2
