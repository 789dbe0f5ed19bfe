"""TransformersConfig: a checkpoint's configuration as transformers reads it, and its refusals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers import __version__ as transformers_version

from worker.model.base import KVLayer
from worker.model.config.context_length import ContextLength
from worker.model.config.model_config import DTYPES, read_json
from worker.model.config.stored_dtype import stored_dtype
from worker.model.errors import UnsupportedModel

logger = logging.getLogger(__name__)

SERVED_ELSEWHERE = "PENSTOCK_ENGINE=vllm may serve it"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Bounds and constants of one model."""

    hugging_face: PreTrainedConfig
    model_type: str
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: frozenset[int]
    kv_layers: tuple[KVLayer, ...] = ()  # of its attention calls in their order, once it was probed


def read_config(directory: Path) -> TransformersConfig:
    """Returns the configuration of the checkpoint in `directory`.

    Raises UnsupportedModel naming the member at fault; CheckpointError for files that are missing
    or no JSON objects.
    """
    raw = read_json(directory / "config.json")
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        own_code = "; its own code (auto_map) is never run" if raw.get("auto_map") else ""
        raise UnsupportedModel(
            f"model_type {model_type!r} is unknown to transformers {transformers_version}{own_code}"
        )
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many kinds: each configuration checks itself
        raise UnsupportedModel(
            f"config.json is refused by transformers: {in_one_line(error)}"
        ) from error
    text = config.get_text_config(decoder=True)
    _check(config, text)
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return TransformersConfig(
        hugging_face=config,
        model_type=config.model_type,
        vocab_size=int(text.vocab_size),
        context_length=_context_length(config),
        dtype=_dtype(config, text, stored_dtype(directory)),
        eos_token_ids=_eos_token_ids(generation, config, text),
    )


def in_one_line(error: BaseException) -> str:
    """Returns the error's text, at most 200 characters of it, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _check(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Refuses checkpoints that the configuration shows to be unsupported."""
    model_type = config.model_type
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedModel(
            f"model_type {model_type!r} has an encoder; decoder-only models are served. "
            f"{SERVED_ELSEWHERE}"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} has no causal language model in transformers "
            f"{transformers_version}; {SERVED_ELSEWHERE}"
        )
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(
            f"model_type {model_type!r} keeps a recurrent state beside its KV cache, which this "
            f"engine does not; {SERVED_ELSEWHERE}"
        )
    others = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()})
    if others := [kind for kind in others if kind not in _ATTENTION_LAYERS]:
        raise UnsupportedModel(
            f"layer_types {', '.join(others)} of model_type {model_type!r} keep a state that is no "
            f"KV cache, which this engine does not; {SERVED_ELSEWHERE}"
        )
    if getattr(text, "alibi", False):
        raise UnsupportedModel(
            f"alibi: model_type {model_type!r} adds position biases to its attention, which this "
            f"engine does not; {SERVED_ELSEWHERE}"
        )


def _context_length(config: PreTrainedConfig) -> int:
    """Returns the longest sequence whose positions do not depend on the batch that it is in.

    RoPE of types dynamic and longrope turns all positions of a batch by its longest sequence: past
    the original length, a sequence's tokens would depend on others, and on when it was cached.
    """
    length = ContextLength.of(config.to_dict())
    if length is None:
        raise UnsupportedModel(
            f"config.json of model_type {config.model_type!r} has no max_position_embeddings"
        )
    if length.longest > length.default:
        logger.warning(
            "context of %d tokens instead of %d: past them the rotary embedding changes all "
            "positions of a sequence, its cached ones too; %s with all",
            length.default,
            length.longest,
            SERVED_ELSEWHERE,
        )
    # Llama 4 counts positions for its temperature from the start of the batch. It is 1 up to here.
    text = config.get_text_config(decoder=True)
    if getattr(text, "attn_temperature_tuning", False) and length.default >= text.floor_scale:
        logger.warning(
            "context of %d tokens instead of %d: past them attn_temperature_tuning counts the "
            "positions of a batch, not of a sequence; %s with all",
            text.floor_scale - 1,
            length.default,
            SERVED_ELSEWHERE,
        )
        text.attn_temperature_tuning = False
        return int(text.floor_scale) - 1
    return length.default


def _dtype(config: PreTrainedConfig, text: PreTrainedConfig, stored: str | None) -> str:
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    value = named or stored or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; known are {', '.join(DTYPES)}")
    return name


def _eos_token_ids(
    generation: Mapping[str, Any], config: PreTrainedConfig, text: PreTrainedConfig
) -> frozenset[int]:
    value = generation.get("eos_token_id")
    for source in (text, config):
        value = getattr(source, "eos_token_id", None) if value is None else value
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise UnsupportedModel(f"eos_token_id {value!r} must be a token id or a list of them")
    return frozenset(ids)
