"""The network that is trained: Qwen3 in plain torch, with the checkpoint's tensor names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes of the network; the defaults are those of the checkpoint that ships."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., size] to the same shape."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with a norm on queries and keys and rotary positions."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Maps [rows, length, hidden] to the same shape; mask [rows, 1, length, length] bool."""
        rows, length, _ = x.shape
        heads = (rows, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return projected


class FeedForward(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Maps [rows, length, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """Token ids to hidden states; `logits` to scores, with the embedding as the output layer.

    `state_dict()` has the names of a Qwen3 checkpoint without their "model." prefix.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Returns hidden states [rows, length, hidden].

        Ids and positions are [rows, length] int64, mask [rows, 1, length, length] (True: attends).
        """
        cos, sin = rotary_tables(positions, self.config)
        x: Tensor = self.embed_tokens(token_ids)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [..., vocab] for [..., hidden]."""
        return functional.linear(hidden, self.embed_tokens.weight)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draws normal weights; those of the residual stream's inputs are scaled by its depth."""
        depth_scale = 1.0 / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.02 if name.startswith("embed") else 1.0 / math.sqrt(weight.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= depth_scale
            with torch.no_grad():
                weight.normal_(0.0, std, generator=generator)


def rotary_tables(positions: Tensor, config: NetworkConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each [rows, 1, length, head_dim] float32, of [rows, length]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions[:, None, :, None].float() * config.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [rows, heads, length, head_dim] rotated, with the halves of a head paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
