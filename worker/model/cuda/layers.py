"""The operations between the products of decoder layers, in one launch each.

The twins are worker.model.layers.ops and worker.model.attention.sdpa.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.model.base import FP8, Activation
from worker.model.cuda.kernels.layers import (
    add_norm_kernel,
    gate_kernel,
    gate_rounded_kernel,
    rotate_and_store_kernel,
    store_kernel,
)
from worker.model.layers.fp8 import LARGEST, LEAST_PEAK
from worker.model.layers.ops import HeadNorm, Norm

_HEADS_A_PROGRAM = 4
_PLACES_A_PROGRAM = 1024  # of a row of a gate


@dataclass(frozen=True, slots=True)
class Rounding:
    """How an FP8 product rounds its input: `group` numbers of a row share a scale, or all have the
    given `scale` [1]."""

    group: int
    scale: Tensor | None

    def empty(self, rows: int, size: int, like: Tensor) -> Rounded:
        """Returns room for [rows, size] of the dtype of `like`."""
        values = torch.empty((rows, size), dtype=FP8, device=like.device)
        scales = torch.empty((rows, size // self.group), dtype=torch.float32, device=like.device)
        return Rounded(values, scales, like.dtype)


@dataclass(frozen=True, slots=True)
class Rounded:
    """What `quantize_rows` returns of numbers that were of `dtype`."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm,
    delta_norm: Norm | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Does what Ops.add_norm does: the sum is written into x, its norm into `out` where
    there is one."""
    normed = torch.empty_like(x) if out is None else out
    _launch_add_norm(x, delta, norm, delta_norm, normed)
    return x, normed


def add_norm_rounded(
    x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None, rounding: Rounding
) -> tuple[Tensor, Rounded]:
    """Does what `add_norm` does, and rounds the norm as `quantize_rows` does."""
    result = rounding.empty(x.shape[0], x.shape[1], x)
    _launch_add_norm(x, delta, norm, delta_norm, result.values, result.scales, rounding)
    return x, result


def _launch_add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm,
    delta_norm: Norm | None,
    normed: Tensor,
    scales: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    size = x.shape[1]
    width = triton.next_power_of_2(size)
    input_scale = None if rounding is None else rounding.scale
    add_norm_kernel[(x.shape[0],)](
        x,
        x if delta is None else delta,
        norm.weight,
        norm.weight if delta_norm is None else delta_norm.weight,
        x,
        normed,
        x if scales is None else scales,
        x if input_scale is None else input_scale,
        norm.eps,
        norm.eps if delta_norm is None else delta_norm.eps,
        SIZE=size,
        WIDTH=width,
        HAS_DELTA=delta is not None,
        HAS_DELTA_NORM=delta_norm is not None,
        ADDS_ONE=norm.adds_one,
        GROUP=0 if rounding is None else rounding.group,
        LARGEST=LARGEST,
        LEAST_PEAK=LEAST_PEAK,
        HAS_SCALE=input_scale is not None,
        num_warps=min(16, max(1, width // 512)),
    )


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Normalises and rotates the queries and keys of qkv [T, (heads + 2 kv_heads) * dim].

    Returns the queries [T, heads, dim], a view of qkv. Keys and values go to their slots of `keys`
    and `values`, one layer's views of the pool; a slot of -1 is skipped. `tables` are the cosines
    and sines of all positions, [positions, dim / 2].
    """
    num_tokens = qkv.shape[0]
    _, block_size, kv_heads, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    cosines, sines = tables
    weights = (cosines, cosines) if norm is None else (norm.query.weight, norm.key.weight)
    rotate_and_store_kernel[(num_tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS_A_PROGRAM))](
        qkv,
        positions,
        slots,
        cosines,
        sines,
        *weights,
        keys,
        values,
        0.0 if norm is None else norm.query.eps,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=dim // 2,
        HALF_WIDTH=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=block_size,
        HEADS_A_PROGRAM=_HEADS_A_PROGRAM,
        HAS_NORM=norm is not None,
        ADDS_ONE=norm is not None and norm.query.adds_one,
        num_warps=2,
    )
    return qkv.view(num_tokens, -1, dim)[:, :heads]


def store_keys_and_values(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Writes k and v [T, kv_heads, dim] to their slots [T] of one layer's views of the pool."""
    for source, cache in ((k, keys), (v, values)):
        store_kernel[(source.shape[0], source.shape[1])](
            source,
            slots,
            cache,
            source.stride(0),
            source.stride(1),
            cache.stride(0),
            cache.stride(1),
            DIM=source.shape[2],
            WIDTH=triton.next_power_of_2(source.shape[2]),
            BLOCK_SIZE=cache.shape[1],
            num_warps=1,
        )


def gate(both: Tensor, activation: Activation) -> Tensor:
    """Returns activation(first half) * second half of [rows, 2 * size], [rows, size]."""
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    gate_kernel[(rows, triton.cdiv(size, _PLACES_A_PROGRAM))](
        both,
        out,
        SIZE=size,
        BLOCK=min(_PLACES_A_PROGRAM, triton.next_power_of_2(size)),
        IS_SILU=activation == "silu",
        num_warps=4,
    )
    return out


def gate_rounded(both: Tensor, activation: Activation, rounding: Rounding) -> Rounded:
    """Does what `gate` does, and rounds its result as `quantize_rows` does."""
    rows, size = both.shape[0], both.shape[1] // 2
    result = rounding.empty(rows, size, both)
    tiles = 1 if rounding.group == size else triton.cdiv(size, _PLACES_A_PROGRAM)
    gate_rounded_kernel[(rows, tiles)](
        both,
        result.values,
        result.scales,
        result.scales if rounding.scale is None else rounding.scale,
        SIZE=size,
        GROUP=rounding.group,
        BLOCK=min(_PLACES_A_PROGRAM, triton.next_power_of_2(size)),
        IS_SILU=activation == "silu",
        LARGEST=LARGEST,
        LEAST_PEAK=LEAST_PEAK,
        HAS_SCALE=rounding.scale is not None,
        num_warps=4,
    )
    return result
