"""Qwen3: queries and keys are normalised per head before the rotation."""

from __future__ import annotations

from worker.model.config import ModelConfig
from worker.model.layers.attention import Attention
from worker.model.layers.decoder import CausalLM
from worker.model.layers.linear import Placement


def build(config: ModelConfig, max_model_len: int, placement: Placement) -> CausalLM:
    """The model with empty parameters."""

    def attention(layer: int) -> Attention:
        return Attention(config, layer, placement=placement, qk_norm=True)

    return CausalLM(config, attention, max_model_len=max_model_len, placement=placement)
