"""A checkpoint in fp8 on a CPU is computed as its twin with plain weights of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from worker.engine_options import EngineOptions
from worker.model.build import build_model
from worker.model.errors import UnsupportedModel

PROMPTS = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (3, 21, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
BLOCK = 16
LARGEST = 448.0  # of float8_e4m3fn


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight [out, in] in fp8, and the scales of its blocks."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return small.view(weight.shape), scales


def plain(small: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return small.float() * wide


def write_twins(path: Path, model_type: str) -> tuple[Path, Path]:
    """Writes a checkpoint in fp8, and one with the same numbers in float32."""
    for name in ("fp8", "plain"):
        (path / name).mkdir()
        write_tiny_model(path / name, model_type)
    stored = load_file(path / "fp8" / "model.safetensors")
    small, twin = dict(stored), dict(stored)
    for name, tensor in stored.items():
        if name.endswith("_proj.weight"):
            small[name], small[f"{name}_scale_inv"] = quantized(tensor)
            twin[name] = plain(small[name], small[f"{name}_scale_inv"])
    save_file(small, path / "fp8" / "model.safetensors", {"format": "pt"})
    save_file(twin, path / "plain" / "model.safetensors", {"format": "pt"})
    file = path / "fp8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    file.write_text(json.dumps(config))
    return path / "fp8", path / "plain"


def outputs(path: Path) -> list[list[int]]:
    built = build_model(
        EngineOptions(
            checkpoint=str(path),
            model_impl="transformers",
            device="cpu",
            dtype="float32",
            num_kv_blocks=64,
        )
    )
    return [result.token_ids for result in generate(new_engine(built), PROMPTS, GREEDY)]


@pytest.mark.parametrize("model_type", ["olmo2", "qwen3_moe"])
def test_it_equals_its_twin(model_type: str, tmp_path: Path) -> None:
    small, twin = write_twins(tmp_path, model_type)
    expected = outputs(twin)
    assert len({token for output in expected for token in output}) > 15
    assert outputs(small) == expected


def test_without_what_reads_it_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, _ = write_twins(tmp_path, "olmo2")
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: False
    )
    with pytest.raises(UnsupportedModel, match=r"accelerate.*PENSTOCK_ENGINE=vllm may serve it"):
        outputs(small)
