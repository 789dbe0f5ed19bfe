"""The context length of ENGINE=vllm: that of this project's own engine. Imports nothing of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.model.config.context_length import ContextLength
from worker.model.errors import CheckpointError, ModelError

AS_MUCH_AS_FITS = -1  # max_model_len: the model's context, shortened to fit the KV cache


def context_args(checkpoint: str, max_model_len: int | None) -> dict[str, Any]:
    """Returns the arguments of EngineArgs for the model's context, or for `max_model_len` tokens.

    Raises ModelError for more tokens than the model has positions.
    """
    config = _read(Path(checkpoint) / "config.json")
    context = ContextLength.of(config)
    if context is None:
        return {"max_model_len": max_model_len or AS_MUCH_AS_FITS}
    if max_model_len is not None and max_model_len > context.longest:
        raise ModelError(
            f"max_model_len {max_model_len} is more than the model's {context.longest} positions: "
            "PENSTOCK_MAX_MODEL_LEN may be at most that"
        )
    args: dict[str, Any] = {"max_model_len": max_model_len or AS_MUCH_AS_FITS}
    if max_model_len is None and context.default < context.longest:
        # vLLM would take all of them, at other frequencies than the model's own.
        args["max_model_len"] = context.default
    if context.by_yarn:
        # vLLM takes it that a file with YaRN has the extended length there already.
        extended: dict[str, Any] = {"max_position_embeddings": context.longest}
        is_nested = isinstance(config.get("text_config"), dict)
        args["hf_overrides"] = {"text_config": extended} if is_nested else extended
    return args


def _read(path: Path) -> dict[str, Any]:
    """Returns {} where there is no file: vLLM has formats without it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
