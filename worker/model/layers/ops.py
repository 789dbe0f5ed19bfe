"""Ops: the operations that layers compute with. TorchOps is the specification and runs anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import Activation, AttentionBackend
from worker.model.layers import fp8
from worker.model.layers.fp8 import Fp8Weight

Multiply = Callable[[Tensor], Tensor]


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

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        """Returns a function [rows, in] -> [rows, out / 2]: activation(gate) * up.

        weight is [out, in], its first half gate; bias [out].
        """
        ...

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns x + delta, and that normalised; all [rows, size].

        `delta_norm`: by which delta is normalised before it is added.
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


@runtime_checkable
class Fp8Ops(Ops, Protocol):
    """Ops that also multiply by weights as FP8 checkpoints have them."""

    def fp8_linear(self, weight: Fp8Weight, bias: Tensor | None) -> Multiply:
        """Returns a function [rows, in] -> [rows, out] which rounds its input to FP8; bias [out]
        is in the model's dtype."""
        ...

    def gated_fp8_linear(
        self, weight: Fp8Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        """Returns what `gated_linear` returns, by `fp8_linear`."""
        ...


@runtime_checkable
class RoundingOps(Ops, Protocol):
    """Ops that round what they multiply, and lose less where they know how large it is."""

    def for_inputs(self, sizes: Tensor) -> Ops:
        """Returns the same ops for a product whose inputs have these root mean squares [in]."""
        ...


def for_inputs(ops: Ops, sizes: Tensor | None) -> Ops:
    """Returns `ops` for a product whose inputs have these root mean squares [in], if known."""
    return ops.for_inputs(sizes) if sizes is not None and isinstance(ops, RoundingOps) else ops


class TorchOps:
    """Rounds where transformers rounds: after every operation."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return lambda x: functional.linear(x, weight, bias)

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        return gated(self.linear(weight, bias), activation)

    def fp8_linear(self, weight: Fp8Weight, bias: Tensor | None) -> Multiply:
        def multiply(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
            rounded = fp8.quantize_rows(x, weight.group, weight.input_scale)
            return fp8.multiply(*rounded, weight, bias).to(x.dtype)

        return multiply

    def gated_fp8_linear(
        self, weight: Fp8Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        return gated(self.fp8_linear(weight, bias), activation)

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


def gated(multiply: Multiply, activation: Activation) -> Multiply:
    """Returns a function [rows, in] -> [rows, out / 2]: activation(gate) * up of `multiply`'s
    result."""

    def multiply_gated(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out / 2]
        gate, up = multiply(x).chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    return multiply_gated


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Returns x [..., size] normalised over the last dimension, in x's dtype.

    Where 1 is added to the weight that is done in float32, before the only rounding; elsewhere the
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
