"""Fp8Format: the quantized weights that are served, as config.json declares them.

All others are refused by name.

Two spellings: `quant_method` "fp8", of transformers, vLLM and the makers of Qwen3 and DeepSeek; and
"compressed-tensors", of llm-compressor. Which weights are quantized, and how many share a scale,
shows in the files: lists of modules that are not (`ignore`, `modules_to_not_convert`) repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.model.errors import UnsupportedModel

_FP8_FORMATS = (None, "e4m3", "float8_e4m3fn")
_MEMBERS = ("quantization_config", "compression_config")
_SERVED = "FP8 (e4m3) weights with scales per tensor, per row or in blocks are served"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights in e4m3 with scales: of a tensor, a row, or blocks of `block` rows and columns.

    `quantizes_inputs`: what they multiply is meant to be rounded to e4m3, too.
    """

    block: tuple[int, int] | None = None
    quantizes_inputs: bool = True


# What transformers reads; the weights of any other method would be taken for plain numbers.
_METHODS_OF_TRANSFORMERS = frozenset(
    {
        *("aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "bitsandbytes_4bit"),
        *("bitsandbytes_8bit", "compressed-tensors", "eetq", "fbgemm_fp8", "fouroversix", "fp8"),
        *("fp_quant", "gptq", "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto"),
        *("quark", "sinq", "spqr", "torchao", "vptq"),
    }
)


def check_method(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for quantized weights that neither this engine nor transformers can
    read: as plain weights they would give nonsense."""
    for member in _MEMBERS:
        if not (given := config.get(member)):
            continue
        if not isinstance(given, Mapping):
            raise UnsupportedModel(f"{member} must be an object")
        method = given.get("quant_method")
        is_older = method is None and (given.get("load_in_8bit") or given.get("load_in_4bit"))
        if method not in _METHODS_OF_TRANSFORMERS and not is_older:
            raise UnsupportedModel(
                f"{member}: quant_method {method!r} is unknown, and its weights cannot be read as "
                f"plain ones; {_SERVED}. PENSTOCK_ENGINE=vllm may serve others"
            )
        fmt = given.get("fmt")
        if method == "fp8" and fmt not in _FP8_FORMATS:
            raise UnsupportedModel(
                f"{member}: fmt {fmt!r} is not supported: FP8 weights in e4m3 are served. "
                "Quantize the model to e4m3, or serve it as it was before"
            )


def fp8_format(config: Mapping[str, Any]) -> Fp8Format | None:
    """Returns how the weights of a parsed config.json are stored, None where they are plain.

    Raises UnsupportedModel, naming the member, for every other kind of quantization.
    """
    for member in _MEMBERS:
        if not (given := config.get(member)):
            continue
        if not isinstance(given, Mapping):
            raise UnsupportedModel(f"{member} must be an object")
        method = given.get("quant_method")
        if method == "fp8":
            return _plain_fp8(given, member)
        if method == "compressed-tensors":
            return _compressed_tensors(given, member)
        raise UnsupportedModel(f"{member}: quant_method {method!r} is not supported; {_SERVED}")
    return None


def _plain_fp8(given: Mapping[str, Any], member: str) -> Fp8Format:
    _check(given, f"{member}: ", fmt=_FP8_FORMATS, scale_fmt=(None, "float"))
    _check(given, f"{member}: ", activation_scheme=(None, "dynamic", "static"))
    block = given.get("weight_block_size")
    if block is None:
        return Fp8Format()
    if given.get("activation_scheme") == "static":
        raise UnsupportedModel(
            f"{member}: activation_scheme 'static' with weight_block_size is not supported"
        )
    return Fp8Format(block=_block(block, f"{member}: weight_block_size"))


def _compressed_tensors(given: Mapping[str, Any], member: str) -> Fp8Format:
    _check(given, f"{member}: ", format=(None, "float-quantized", "naive-quantized"))
    for name in ("sparsity_config", "transform_config"):
        inner = given.get(name)
        if inner and not (isinstance(inner, Mapping) and inner.get("format") == "dense"):
            raise UnsupportedModel(f"{member}: {name} is not supported")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedModel(f"{member}: config_groups must be an object that is not empty")
    formats = {_group(group, f"{member}: {name}: ") for name, group in groups.items()}
    if len(formats) > 1:
        raise UnsupportedModel(f"{member}: config_groups that differ are not supported; {_SERVED}")
    return formats.pop()


def _group(group: Any, where: str) -> Fp8Format:
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        raise UnsupportedModel(f"{where}weights must be an object")
    _check(group, where, format=(None, "float-quantized", "naive-quantized"))
    if group.get("output_activations"):
        raise UnsupportedModel(f"{where}output_activations are not supported")
    _check_float(weights, f"{where}weights: ", strategy=("tensor", "channel", "block"))
    _check(weights, f"{where}weights: ", dynamic=(None, False), symmetric=(None, True))
    in_blocks = weights.get("strategy") == "block"
    block = _block(weights.get("block_structure"), f"{where}block_structure") if in_blocks else None
    inputs = group.get("input_activations")
    if not inputs:
        return Fp8Format(block, quantizes_inputs=False)
    if not isinstance(inputs, Mapping):
        raise UnsupportedModel(f"{where}input_activations must be an object")
    of_inputs = f"{where}input_activations: "
    _check(inputs, of_inputs, symmetric=(None, True))
    if inputs.get("dynamic") is True:
        _check_float(inputs, of_inputs, strategy=("token", "tensor", "group"))
        _check(inputs, of_inputs, group_size=(None, block[1] if block else None))
    elif in_blocks:
        raise UnsupportedModel(f"{of_inputs}static scales with blocks are not supported")
    else:
        _check_float(inputs, of_inputs, strategy=("tensor",))
        _check(inputs, of_inputs, dynamic=(None, False))
    return Fp8Format(block)


def _check_float(of: Mapping[str, Any], where: str, *, strategy: Sequence[str]) -> None:
    if (kind := (of.get("type"), of.get("num_bits"))) != ("float", 8):
        raise UnsupportedModel(
            f"{where}type {kind[0]!r} of {kind[1]!r} bits is not supported; {_SERVED}"
        )
    _check(of, where, strategy=strategy)


def _check(of: Mapping[str, Any], where: str, **accepted: Sequence[object]) -> None:
    for member, values in accepted.items():
        if of.get(member) not in values:
            raise UnsupportedModel(
                f"{where}{member} {of.get(member)!r} is not supported; {_SERVED}"
            )


def _block(value: Any, where: str) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise UnsupportedModel(f"{where} must be two whole numbers, got {value!r}")
    return value[0], value[1]
