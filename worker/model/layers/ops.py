"""Ops: the operations that layers compute with. TorchOps is the specification and runs anywhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import Activation, AttentionBackend, Multiply
from worker.model.layers.linear_method import DenseMethod


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm: x / rms(x) times `weight` [size], or times 1 + weight."""

    weight: Tensor
    eps: float
    adds_one: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norms [head_dim] of query and key heads, of the same kind."""

    query: Norm
    key: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A mixture's experts, each down(activation(gate) * up); gates are the first half of gate_up.

    `clamped` is gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and up
    between -limit and limit.
    """

    gate_up: Tensor  # [experts, 2 * inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, hidden]
    activation: Activation | Literal["clamped"]
    limit: float = 0.0
    alpha: float = 0.0


# Called with x [tokens, hidden], the experts of each token [tokens, chosen] and their weights;
# returns [tokens, hidden]; all contiguous.
ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]

# What torch's private operators raise where they are missing, or have changed. Callers log or
# return them.
OPERATOR_ERRORS = (RuntimeError, AttributeError, NotImplementedError, TypeError)


class Ops(DenseMethod):
    """The operations of a layer: products of dense weights, and what stands between them.

    Inputs are contiguous, in the model's dtype, on its device.

    An op may write into its first argument and may return memory of its own that its next call
    with as many tokens overwrites: results are used before the same op is called again, and the
    argument is given up.
    """

    @abstractmethod
    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns x + delta, and that normalised; all [rows, size].

        `delta_norm`: by which delta is normalised before it is added.
        """

    @abstractmethod
    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        norm: HeadNorm | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits [tokens, (heads + 2 kv_heads) * head_dim] into q, k, v [tokens, heads, head_dim].

        q and k are normalised per head where there is a norm, then rotated; cos and sin are
        [tokens, 1, head_dim / 2]. The results may be strided views.
        """

    def experts(self, weights: ExpertWeights) -> ComputeExperts | None:
        """Returns what computes all experts at once; None where each is products of its own."""
        return None


def for_inputs(ops: Ops, sizes: Tensor | None) -> Ops:
    """Returns `ops` for a product whose inputs have these root mean squares [in], if known."""
    return ops if sizes is None else ops.for_inputs(sizes)


class TorchOps(Ops):
    """Rounds where transformers rounds: after every operation."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return lambda x: functional.linear(x, weight, bias)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + (delta if delta_norm is None else normalize(delta, delta_norm))
        return x, normalize(x, norm)

    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        norm: HeadNorm | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rotated = num_heads + num_kv_heads
        heads = qkv.view(qkv.shape[0], num_rotated + num_kv_heads, -1)
        rotated = heads[:, :num_rotated]
        if norm is not None:
            parts = ((rotated[:, :num_heads], norm.query), (rotated[:, num_heads:], norm.key))
            rotated = torch.cat([normalize(part, of_part) for part, of_part in parts], dim=1)
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_rotated:]


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Returns x [..., size] normalised over the last dimension, in x's dtype.

    If 1 is added to the weight, this is done in float32, before the only rounding; otherwise the
    result is rounded before it is multiplied. Both as transformers has it.
    """
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(mean_square + norm.eps)
    if norm.adds_one:
        return (wide * (1.0 + norm.weight.float())).to(x.dtype)
    return norm.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's positions, [num_tokens, 1, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments that all layers of one forward pass share.

    `backend` has been prepared for exactly these tokens, whose positions the rotations are of.
    """

    ops: Ops
    backend: AttentionBackend
    rotation: Rotation
    local_rotation: Rotation  # of local layers
