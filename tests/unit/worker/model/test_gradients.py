"""Serving never records anything for a backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from shared.messages import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import generate, new_engine
from worker.engine_options import EngineOptions
from worker.model.build import build_model


@pytest.mark.promise(
    "Streaming: one model for the life of the process, no gradients, greedy output never varies "
    "(up to rounding where products of many rows are computed differently (ADR 9), never for "
    "small weights)"
)
def test_no_step_computes_with_gradients(tmp_path: Path) -> None:
    built = build_model(
        EngineOptions(checkpoint=str(make_checkpoint(tmp_path)), device="cpu", num_kv_blocks=16)
    )
    seen: set[tuple[bool, bool]] = set()

    def look(module: nn.Module, args: object, output: object) -> None:
        needs = isinstance(output, torch.Tensor) and output.requires_grad
        seen.add((torch.is_grad_enabled(), needs))

    hook = register_module_forward_hook(look)
    try:
        (result,) = generate(
            new_engine(built), [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3)
        )
    finally:
        hook.remove()
    assert result.token_ids
    assert seen == {(False, False)}
