"""The attention block around an AttentionBackend."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.model.config import ModelConfig
from worker.model.layers.linear import Linear, Placement, RMSNorm
from worker.model.layers.ops import HeadNorm, Ops, Step


class Attention(nn.Module):
    """Grouped-query self-attention; queries and keys may be normalised per head."""

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.attention_bias,
            placement=placement,
        )
        self.output = Linear(
            queries,
            {"o_proj": config.hidden_size},
            bias=config.output_bias,
            placement=placement,
        )
        eps, qk_norm = config.rms_norm_eps, config.has_qk_norm
        self.q_norm = RMSNorm(config.head_dim, eps, placement=placement) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps, placement=placement) if qk_norm else None
        self._head_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            self._head_norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, eps)

    def use(self, ops: Ops) -> None:
        self.qkv.use(ops)
        self.output.use(ops)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Maps [num_tokens, hidden] to the same shape; writes keys and values to the cache."""
        queries, keys, values = step.ops.rotate(
            self.qkv(x), self.num_heads, self.num_kv_heads, self._head_norm, step.cos, step.sin
        )
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        step.backend.forward(self.layer, queries, keys, values, out)
        output: Tensor = self.output(out.view(x.shape[0], -1))
        return output

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.named_tensors(prefix)
        yield from self.output.named_tensors(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.named_tensors(f"{prefix}q_norm.")
            yield from self.k_norm.named_tensors(f"{prefix}k_norm.")
