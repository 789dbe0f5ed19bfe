"""Ops: the operations that layers compute with. TorchOps is the specification and runs anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.attention.base import AttentionBackend

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights [head_dim] of the norms of query and key heads."""

    query: Tensor
    key: Tensor
    eps: float


# What torch's private operators raise where they are missing, or have changed. Callers log or
# return them.
OPERATOR_ERRORS = (RuntimeError, AttributeError, NotImplementedError, TypeError)


class Ops(Protocol):
    """One step of a layer each. Inputs are contiguous, in the model's dtype, on its device.

    An op may write into its first argument and may return memory of its own that its next call
    with as many tokens overwrites: results are used before the same op is called again, and the
    argument is given up.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Returns a function [rows, in] -> [rows, out]; weight is [out, in], bias [out].

        Takes the weight over: after this its owner lets go of it.
        """
        ...

    def gated_linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Returns a function [rows, in] -> [rows, out / 2]: silu(gate) * up.

        weight is [out, in], its first half gate; bias [out].
        """
        ...

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns x + delta, and that normalised by its root mean square; all [rows, size].

        `weight` is [size].
        """
        ...

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
        ...


class TorchOps:
    """Rounds where transformers rounds: after every operation."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return lambda x: functional.linear(x, weight, bias)

    def gated_linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return gated(self.linear(weight, bias))

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, weight * rms_normalize(x, eps)

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
            rotated = rms_normalize(rotated, norm.eps)
            rotated[:, :num_heads] *= norm.query
            rotated[:, num_heads:] *= norm.key
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_rotated:]


def gated(multiply: Multiply) -> Multiply:
    """Returns a function [rows, in] -> [rows, out / 2]: silu(gate) * up of `multiply`'s result."""

    def multiply_gated(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out / 2]
        gate, up = multiply(x).chunk(2, dim=-1)
        return functional.silu(gate) * up

    return multiply_gated


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Returns x [..., size] / rms(x) over the last dimension: computed in float32, in x's dtype."""
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments that all layers of one forward pass share.

    `backend` has been prepared for exactly these tokens; `cos` and `sin` are those of their
    positions, [num_tokens, 1, head_dim / 2] float32.
    """

    ops: Ops
    backend: AttentionBackend
    cos: Tensor
    sin: Tensor
