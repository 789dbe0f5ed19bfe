"""Which file builds which model_type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.model.config import ModelConfig
from worker.model.errors import UnsupportedModel

if TYPE_CHECKING:
    from worker.model.layers.decoder import CausalLM
    from worker.model.layers.linear import Placement


def create_model(config: ModelConfig, max_model_len: int, placement: Placement) -> CausalLM:
    """The family's model with empty parameters.

    A family is imported when it is asked for, so one that cannot be imported harms no other.
    """
    if config.model_type == "qwen3":
        from worker.model.families.qwen3 import build
    elif config.model_type == "qwen2":
        from worker.model.families.qwen2 import build
    elif config.model_type == "llama":
        from worker.model.families.llama import build
    else:
        raise UnsupportedModel(f"model_type {config.model_type!r} has no family")
    return build(config, max_model_len, placement)
