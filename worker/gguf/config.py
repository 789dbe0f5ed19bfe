"""config.json and generation_config.json out of a GGUF file's metadata.

What changes the computation and is not understood is refused by name, as in a config.json.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.model.config.gguf_header import GgufEntry, GgufModel
from worker.model.errors import UnsupportedModel

# Members of an architecture's metadata that change the computation, and are not read.
_CHANGING = re.compile(
    r"expert|scale|softcap|alibi|clamp|causal|sections|residual|temperature|ssm|shared_kv|nextn"
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Tokens that end an answer whatever the metadata names: llama.cpp has the same list.
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL = (3, 4)  # types of tokens: control, user-defined
# Llama 3.1's scaling, of which the file has the factors alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
_GEMMA3_PATTERN = 6  # layers, of which the last one sees all tokens
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How an architecture of GGUF is written in config.json."""

    model_type: str
    class_name: str
    further: Callable[[GgufModel], dict[str, Any]] = lambda model: {}
    known: frozenset[str] = field(default_factory=frozenset)  # of _CHANGING


def _qwen2(model: GgufModel) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _llama(model: GgufModel) -> dict[str, Any]:
    names = model.entries
    return {
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
    }


def _gemma3(model: GgufModel) -> dict[str, Any]:
    layers, heads = model.whole("gemma3.block_count"), model.whole("gemma3.attention.head_count")
    wide = model.whole("gemma3.embedding_length")
    scalar = wide // heads if layers == _GEMMA3_27B_LAYERS else _head_dim(model)
    theta = model.number("gemma3.rope.freq_base", 1_000_000.0)
    rope = _rope_scaling(model)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": model.whole("gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA3_PATTERN else "full_attention"
            for layer in range(layers)
        ],
        "rope_theta": theta,
        "rope_local_base_freq": model.number("gemma3.rope.freq_base_swa", 10_000.0),
        **({"rope_scaling": rope} if rope else {}),
    }


ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _llama),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _qwen2),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3),
}


def config_of(model: GgufModel) -> dict[str, Any]:
    """Returns config.json. Raises UnsupportedModel naming the architecture or the key at fault,
    CheckpointError for metadata that are missing or of a wrong type."""
    name, file = model.architecture, model.path.name
    if (architecture := ARCHITECTURES.get(name)) is None:
        raise UnsupportedModel(
            f"{file}: architecture {name!r} is not read from GGUF; {', '.join(ARCHITECTURES)} are. "
            "Serve the safetensors checkpoint that the file was made from, or put Penstock in "
            "front of llama.cpp's server with PENSTOCK_ENGINE=http"
        )
    _check_members(model)
    layers = model.whole(f"{name}.block_count")
    embedding = model.entries.get("token_embd.weight")
    if layers > len(model.entries):  # each has several tensors
        raise UnsupportedModel(
            f"{file} names {layers} layers and has {len(model.entries)} tensors: it is no whole "
            "model"
        )
    if not layers or embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel(
            f"{file} has no layers or no token_embd.weight: it is no whole model"
        )
    heads = model.whole(f"{name}.attention.head_count")
    if not heads:
        raise UnsupportedModel(f"{file}: {name}.attention.head_count is 0")
    rope = _rope_scaling(model)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": model.whole(f"{name}.embedding_length"),
        "intermediate_size": model.whole(f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.whole(f"{name}.attention.head_count_kv", heads),
        "head_dim": _head_dim(model),
        "rms_norm_eps": _rounded(model.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": model.whole(f"{name}.context_length"),
        "rope_theta": _rounded(model.number(f"{name}.rope.freq_base", 10_000.0)),
        **({"rope_scaling": rope} if rope else {}),
        "tie_word_embeddings": "output.weight" not in model.entries,
        "dtype": _dtype(model.entries.values()),
        **architecture.further(model),
    }


def generation_config_of(model: GgufModel, tokens: Sequence[str], types: Sequence[int]) -> object:
    """Returns generation_config.json: which tokens end an answer."""
    named = [model.whole(f"tokenizer.ggml.{key}", len(tokens)) for key in _END_KEYS]
    by_text = [
        token_id
        for token_id, token in enumerate(tokens)
        if token in _ENDS and types[token_id] in _SPECIAL
    ]
    ids = [token_id for token_id in (*named, *by_text) if token_id < len(tokens)]
    return {"eos_token_id": list(dict.fromkeys(ids))}


def _check_members(model: GgufModel) -> None:
    """Raises UnsupportedModel for a member that would change the computation."""
    prefix = f"{model.architecture}."
    for key, value in model.metadata.items():
        member = key.removeprefix(prefix)
        neutral = value is False if "causal" not in member else value is True
        is_zero = not isinstance(value, bool) and value == 0
        if (
            not key.startswith(prefix)
            or member.startswith("rope.scal")
            or not _CHANGING.search(member)
            or neutral
            or is_zero
        ):
            continue
        raise UnsupportedModel(
            f"{model.path.name}: {key} is {value!r:.60}, which is not supported for GGUF files"
        )


def _head_dim(model: GgufModel) -> int:
    name = model.architecture
    heads = max(1, model.whole(f"{name}.attention.head_count"))
    size = model.whole(
        f"{name}.attention.key_length", model.whole(f"{name}.embedding_length") // heads
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := model.whole(f"{name}.{key}", size)) != size:
            raise UnsupportedModel(
                f"{model.path.name}: {name}.{key} is {other}, and a head has {size}: only equal "
                "ones are supported"
            )
    return size


def _rope_scaling(model: GgufModel) -> dict[str, Any]:
    """Returns the member rope_scaling; {} where positions are not scaled."""
    name, file = model.architecture, model.path.name
    prefix = f"{name}.rope.scaling."
    if (factors := model.entries.get("rope_freqs.weight")) is not None:
        return _llama3_scaling(model, factors)
    kind = model.text(f"{prefix}type") or "none"
    factor = model.number(f"{prefix}factor", model.number(f"{name}.rope.scale_linear", 0.0))
    if kind == "none" and model.number(f"{name}.rope.scale_linear", 0.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{file}: {prefix}type {kind!r} is not supported; none, linear and yarn are"
        )
    if model.number(f"{prefix}attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{file}: {prefix}attn_factor is not supported")
    original = model.whole(f"{prefix}original_context_length", 0)
    given = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    return {
        "rope_type": "yarn",
        "factor": factor,
        **({"original_max_position_embeddings": original} if original else {}),
        **{
            member: model.number(prefix + key)
            for member, key in given.items()
            if prefix + key in model.metadata
        },
    }


def _llama3_scaling(model: GgufModel, entry: GgufEntry) -> dict[str, Any]:
    """Returns Llama 3.1's scaling, whose factors a file has instead of its parameters.

    Raises UnsupportedModel where they do not follow from it.
    """
    size = _head_dim(model)
    theta = model.number(f"{model.architecture}.rope.freq_base", 10_000.0)
    if entry.type_name != "F32" or entry.shape != (size // 2,):
        raise UnsupportedModel(f"{model.path.name}: {entry.name} has shape {list(entry.shape)}")
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        stored = struct.unpack(f"<{size // 2}f", file.read(entry.num_bytes))
    factor = max(stored)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
        **_LLAMA3,
    }
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for index, found in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (2 * index / size)
        turns = _LLAMA3_POSITIONS / wavelength
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(found, expected, rel_tol=1e-3):
            raise UnsupportedModel(
                f"{model.path.name}: {entry.name} scales positions in another way than Llama 3.1, "
                "which is not supported"
            )
    return scaling


def _dtype(entries: Any) -> str:
    """Returns the dtype of most numbers in matrices; bfloat16 for those in blocks, of which each
    holds fewer digits than that."""
    numbers: Counter[str] = Counter()
    for entry in entries:
        if len(entry.shape) == 2:
            numbers[_DTYPES.get(entry.type_name, "bfloat16")] += math.prod(entry.shape)
    return numbers.most_common(1)[0][0]


def _rounded(value: float) -> float:
    """Returns the shortest decimal of a float32: 1e-05 for 9.999999747e-06."""
    if not value:
        return value
    digits = next(n for n in range(1, 18) if _float32(float(f"{value:.{n}g}")) == _float32(value))
    return float(f"{value:.{digits}g}")


def _float32(value: float) -> bytes:
    return struct.pack("<f", max(-3e38, min(3e38, value)))
