"""Tiny random LoRA adapters in the format of PEFT, and checkpoints with their weights merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from worker.lora import CONFIG, WEIGHTS

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
_PREFIX = "base_model.model."
_GAIN = 0.6  # of a product's output: an adapter that changes no token would prove nothing


def write_adapter(path: Path, checkpoint: Path, *, seed: int, rank: int = 4) -> Path:
    """Writes an adapter for all products of TARGETS into the directory `path`."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, weight in _weights(checkpoint).items():
        if name.rpartition(".weight")[0].endswith(TARGETS):
            rows, columns = weight.shape
            down = torch.randn(rank, columns, generator=generator) * columns**-0.5
            up = torch.randn(rows, rank, generator=generator) * (_GAIN / 2 * rank**-0.5)
            module = _PREFIX + name.removesuffix(".weight")
            matrices |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    path.mkdir(parents=True)
    save_file(matrices, path / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS}
    (path / CONFIG).write_text(json.dumps(config))
    return path


def write_merged(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """Writes a checkpoint into the directory `path` whose weights include the adapter's."""
    shutil.copytree(checkpoint, path)
    config = json.loads((adapter / CONFIG).read_text())
    matrices = load_file(adapter / WEIGHTS)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            module = _PREFIX + name.removesuffix(".weight")
            if (down := matrices.get(f"{module}.lora_A.weight")) is not None:
                up = matrices[f"{module}.lora_B.weight"]
                weights[name] = weights[name] + config["lora_alpha"] / config["r"] * (up @ down)
        save_file(weights, file, metadata={"format": "pt"})
    return path


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, weight in load_file(file).items()
    }
