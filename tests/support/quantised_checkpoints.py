"""Tiny quantised checkpoints, as AutoAWQ, GPTQModel, llm-compressor and makers of FP8 write them.

Each comes with a twin: the same model with the weights that the quantised ones stand for, in
float32. What a correct engine computes of both differs by rounding only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint

BITS_4 = 4
PER_INT32 = 8  # values of four bits
GROUP = 32  # input features that share a scale
BLOCK = 128  # of FP8 in blocks
FP8 = torch.float8_e4m3fn
# Column i of eight goes to this place in an int32 of AWQ's, counted from the lowest bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# Fits every format: widths are multiples of BLOCK, also those of the key and value heads.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# Returns the tensors that replace `<name>.weight`, by suffix, and the weight that they stand for.
Quantise = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """A way of writing the weights of linear layers; `config` is config.json's quantization_config.

    `quantises_activations`: the engine rounds what it multiplies them with, too.
    """

    name: str
    config: dict[str, Any]
    quantise: Quantise
    quantises_activations: bool = False


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_quantised(
    directory: Path,
    format: Format,
    family: str = "qwen3",
    is_quantised: Callable[[str], bool] = is_projection,
    **shape: Any,
) -> tuple[Path, Path]:
    """Writes a checkpoint in `format` and its dequantised twin. Returns both directories.

    Embeddings, norms and lm_head stay as they are, which is what the tools do by default.
    """
    twin = make_checkpoint(directory / f"{format.name}-twin", family, **SHAPE | shape)
    quantised = directory / format.name
    shutil.copytree(twin, quantised)
    stored, meant = {}, {}
    for name, tensor in load_file(twin / "model.safetensors").items():
        if not is_quantised(name):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = format.quantise(tensor)
        prefix = name.removesuffix("weight")
        stored |= {prefix + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    save_file(meant, twin / "model.safetensors", {"format": "pt"})
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": format.config}, indent=2))
    return quantised, twin


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """Returns weight [out, in] as [out, groups, GROUP]."""
    return weight.unflatten(1, (-1, GROUP))


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Returns int32 [..., n / 8] of values of four bits [..., n], the first in the lowest bits."""
    shifts = torch.arange(0, 32, BITS_4)
    words = (values.to(torch.int64).unflatten(-1, (-1, PER_INT32)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Zero points per group; everything transposed to [in, out]."""
    groups = _grouped(weight)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = (groups / scales + zeros).round().clamp(0, 15)
    order = torch.tensor(AWQ_ORDER)

    def packed(transposed: torch.Tensor) -> torch.Tensor:
        return _packed(transposed.unflatten(-1, (-1, PER_INT32))[..., order].flatten(-2))

    parts = {
        "qweight": packed(values.flatten(1).T),
        "qzeros": packed(zeros.squeeze(-1).T),
        "scales": scales.squeeze(-1).T.half(),
    }
    return parts, ((values - zeros) * scales).flatten(1)


def _symmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values of -8 to 7 [out, in] and scales [out, groups], rounded to bfloat16."""
    groups = _grouped(weight)
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    return (groups / scales).round().clamp(-8, 7).flatten(1), scales.squeeze(-1)


def _gptq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Packed along the input features; zero points are stored one too small."""
    values, scales = _symmetric(weight)
    num_in = weight.shape[1]
    parts = {
        "qweight": _packed(values + 8).T,
        "qzeros": _packed(torch.full_like(scales.T, 7)),
        "scales": scales.T.half(),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
    }
    return parts, (_grouped(values) * scales.half().float()[..., None]).flatten(1)


def _w4a16(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scales = _symmetric(weight)
    parts = {
        "weight_packed": _packed(values + 8),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (_grouped(values) * scales[..., None]).flatten(1)


def _w8a8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round()
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def _fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for the tensor."""
    scale = weight.abs().amax() / torch.finfo(FP8).max
    values = (weight / scale).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _fp8_in_blocks(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for each BLOCK x BLOCK."""
    blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [n, B, m, B]
    scales = blocks.abs().amax((1, 3)) / torch.finfo(FP8).max
    wide = scales[:, None, :, None]
    values = (blocks / wide).to(FP8)
    meant = (values.float() * wide).reshape(weight.shape)
    return {"weight": values.reshape(weight.shape), "weight_scale_inv": scales}, meant


def _fp8_rows(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for each row, rounded to bfloat16."""
    scales = (weight.abs().amax(1, keepdim=True) / torch.finfo(FP8).max).bfloat16()
    values = (weight / scales.float()).to(FP8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def _fp8_static(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for the tensor, and one for what it multiplies."""
    parts, meant = _fp8(weight)
    return {**parts, "input_scale": torch.tensor([0.05])}, meant


def _renamed(quantise: Quantise, **names: str) -> Quantise:
    def renamed(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, meant = quantise(weight)
        return {names.get(name, name): part for name, part in parts.items()}, meant

    return renamed


def _compressed_tensors(format: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _integers(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    kind = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": strategy}
    return {**kind, "dynamic": False, "group_size": None, **more}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return _integers(8, strategy, **{"type": "float", **more})


FORMATS = {
    format.name: format
    for format in (
        Format(
            "awq",
            {
                "quant_method": "awq",
                "bits": BITS_4,
                "group_size": GROUP,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            },
            _awq,
        ),
        Format(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": BITS_4,
                "group_size": GROUP,
                "sym": True,
                "desc_act": False,
                "lm_head": False,
                "checkpoint_format": "gptq",
            },
            _gptq,
        ),
        Format(
            "fp8",
            {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
            _fp8,
            quantises_activations=True,
        ),
        Format(
            "fp8-blocks",
            {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ["lm_head"],
            },
            _fp8_in_blocks,
            quantises_activations=True,
        ),
        Format(
            "w8a8",
            _compressed_tensors(
                "int-quantized",
                _integers(8, "channel"),
                _integers(8, "token", dynamic=True),
            ),
            _w8a8,
            quantises_activations=True,
        ),
        Format(
            "w4a16",
            _compressed_tensors("pack-quantized", _integers(4, "group", group_size=GROUP), None),
            _w4a16,
        ),
    )
}

# FP8 as the makers of checkpoints write it, for our own loader.
FP8_FORMATS = {
    format.name: format
    for format in (
        FORMATS["fp8"],
        FORMATS["fp8-blocks"],
        Format(
            "fp8-rows",  # llm-compressor's FP8_DYNAMIC
            _compressed_tensors(
                "float-quantized", _floats("channel"), _floats("token", dynamic=True)
            ),
            _fp8_rows,
            quantises_activations=True,
        ),
        Format(
            "fp8-static",  # llm-compressor's FP8
            _compressed_tensors("float-quantized", _floats("tensor"), _floats("tensor")),
            _fp8_static,
            quantises_activations=True,
        ),
        Format(
            "fp8-weights",  # what they multiply is not rounded
            _compressed_tensors("naive-quantized", _floats("channel"), None),
            _fp8_rows,
        ),
        Format(
            "fp8-block",  # llm-compressor's FP8_BLOCK
            _compressed_tensors(
                "float-quantized",
                _floats("block", block_structure=[BLOCK, BLOCK]),
                _floats("group", dynamic=True, group_size=BLOCK),
            ),
            _renamed(_fp8_in_blocks, weight_scale_inv="weight_scale"),
            quantises_activations=True,
        ),
        Format(
            "fp8-mistral",
            {
                "quant_method": "fp8",
                "activation_scheme": "static",
                "weight_block_size": None,
                "modules_to_not_convert": ["vision_tower", "lm_head"],
            },
            _renamed(_fp8_static, weight_scale="weight_scale_inv", input_scale="activation_scale"),
            quantises_activations=True,
        ),
    )
}
