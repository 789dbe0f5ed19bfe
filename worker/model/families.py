"""Model families: what distinguishes one `model_type` from another.

To add a family whose layers are the ones of `worker.model.layers`, add a row here and a test that
compares its logits with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Traits of a model_type, and the values that transformers takes for members left out."""

    architecture: str
    has_qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    has_qkv_bias: bool = False  # whatever config.json says; the output projection has none then
    has_mlp_bias: bool = False  # where config.json says so
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: num_attention_heads
    max_position_embeddings: int
    eos_token_id: int | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        has_mlp_bias=True,
        max_position_embeddings=2048,
        eos_token_id=2,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        has_qkv_bias=True,
        num_kv_heads=32,
        max_position_embeddings=32_768,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        has_qk_norm=True,
        head_dim=128,
        num_kv_heads=32,
        max_position_embeddings=32_768,
    ),
}
