"""Int8 products: weights per output channel, activations per token, both symmetric.

Both are spread by a Hadamard transform first (see `spread`). Weights are quantized once, at load,
from the model's dtype; activations in every product. Int8Ops is the specification of the faster
ones in worker.model.cpu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import Multiply
from worker.model.layers.ops import TorchOps

_LEAST_PEAK = 1e-10
_ROWS_AT_ONCE = 4096
_LANES = 16  # numbers of a group, a vector of the kernels
_LEAST_LAST = 8  # groups that are transformed together
_MOST_BALANCE = 100.0


@cache
def _signs(size: int) -> Tensor:
    """Returns [size] float32 of 1 and -1, at random but always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


@cache
def _hadamard(size: int) -> Tensor:
    """Returns the Hadamard matrix [size, size] over sqrt(size); `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _mixed(x: Tensor) -> Tensor:
    """Returns x [rows, groups, lanes] times the Hadamard matrix of the groups, a power of two of
    them, as two smaller products."""
    rows, groups, lanes = x.shape
    low = 1 << (groups.bit_length() - 1) // 2
    high = groups // low
    there = _hadamard(low) @ x.reshape(rows * high, low, lanes)
    return (_hadamard(high) @ there.view(rows, high, low * lanes)).view(x.shape)


def spread(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Returns x [rows, size], times `scale` [size], by an orthogonal matrix, in float32.

    A few channels of activations are many times as large as the rest. Spread over many places, the
    largest number is about as large as in noise, and one scale serves the whole row. Products of x
    and a weight that are both spread are the same. Signs are changed, then each 16 numbers get a
    Hadamard transform, then the first groups of 16, the largest power of two of them. Where that is
    not all, the last groups get signs and a transform, too: about twice as many as the rest.
    """
    rows, size = x.shape
    lanes = min(_LANES, size & -size)
    groups = size // lanes
    first = 1 << (groups.bit_length() - 1)
    factors = spreading_factors(size, scale).view(2, groups, lanes)
    within = (x.float().reshape(rows, groups, lanes) * factors[0]) @ _hadamard(lanes)
    mixed = _mixed(within[:, :first])
    if first < groups:
        last = min(first, _LEAST_LAST)
        while last < first and last < 2 * (groups - first):
            last *= 2
        mixed = torch.cat((mixed, within[:, first:]), dim=1)
        there = _mixed(mixed[:, -last:] * factors[1, -last:])
        mixed = torch.cat((mixed[:, :-last], there), dim=1)
    return mixed.reshape(rows, size)


def spreading_factors(size: int, scale: Tensor | None = None) -> Tensor:
    """Returns [2 * size] float32: what numbers are multiplied by before each transform."""
    signs = _signs(size)
    return torch.cat((signs if scale is None else signs * scale, signs))


def balance(weight: Tensor, input_sizes: Tensor | None) -> Tensor | None:
    """Returns [in], by which columns of weight [out, in] are multiplied and inputs divided.

    Rounding costs least where both are as large in every channel. `input_sizes` [in] are root mean
    squares of the inputs; None where they are not known, and then None is returned.
    """
    if input_sizes is None:
        return None
    columns: Tensor = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32)
    ratio: Tensor = (input_sizes.clamp_min(_LEAST_PEAK) / columns.clamp_min(_LEAST_PEAK)).sqrt()
    ratio = ratio / ratio.mean()
    if not ratio.isfinite().all():
        return None
    return ratio.clamp(1 / _MOST_BALANCE, _MOST_BALANCE)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`values` [out, in] int8 in -127..127; a row times its scale [out] is the weight's, spread."""

    values: Tensor
    scales: Tensor


def quantize_weight(weight: Tensor, scale: Tensor | None = None) -> Int8Weight:
    """Returns [out, in] spread and rounded to int8; the error is at most half a scale.

    `scale` [in] multiplies the columns first.
    """
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    # Piece by piece: an output matrix in float32, several times over, is gigabytes.
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        wide = spread(weight[rows], scale)
        scales[rows] = wide.abs().amax(dim=1).clamp_min(_LEAST_PEAK) / 127
        values[rows] = (wide / scales[rows, None]).round().to(torch.int8)
    return Int8Weight(values, scales)


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns x [rows, in] spread, as uint8 around 128, and float32 scales [rows, 1].

    A scale is NaN where its row is not finite. `scale` [in] multiplies the columns first.
    """
    wide = spread(x, scale)
    peak = wide.abs().amax(dim=1, keepdim=True)
    bounded = torch.where(peak.isfinite(), peak, 1.0).clamp_min(_LEAST_PEAK)
    values = (wide.nan_to_num() * (127 / bounded) + 128).round().clamp(1, 255)
    scales = torch.where(peak.isfinite(), bounded / 127, torch.nan)
    return values.to(torch.uint8), scales


class Int8Ops(TorchOps):
    """Multiplies the whole numbers in float64, where they are exact. Slow, and runs everywhere."""

    measures_inputs = True
    quantize = staticmethod(quantize_weight)

    def __init__(self, input_sizes: Tensor | None = None) -> None:
        self._input_sizes = input_sizes

    def for_inputs(self, sizes: Tensor) -> Self:
        return type(self)(sizes)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        scale = balance(weight, self._input_sizes)
        inverse = None if scale is None else 1 / scale
        quantized = self.quantize(weight, scale)
        values = quantized.values

        def multiply(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
            rows, row_scales = quantize_rows(x, inverse)
            exact = functional.linear(rows.double() - 128, values.double())
            result = exact.float() * (row_scales * quantized.scales)
            return (result if bias is None else result + bias.float()).to(x.dtype)

        return multiply
