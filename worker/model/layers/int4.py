"""Int4 products: int8's, whose weights are kept in four bits.

A weight is spread and balanced as int8's is. Then each 32 of a row get a factor, a whole number up
to 15, and an offset: a weight is its number of four bits times the factor, less the offset, a whole
number of the row's int8 scale. All sums are int8's, whole numbers, however few bits a weight takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.layers.int8 import Int8Ops, Int8Weight, spread
from worker.model.layers.int8 import quantize_weight as quantize_to_int8

GROUP = 32  # weights of a row with one factor and offset
_MOST_FACTOR = 15
_MOST_NUMBER = 15
_LEAST_PEAK = 1e-10
_ROWS_AT_ONCE = 4096
# Factors that are tried, below the one at which a group's numbers reach from 0 to 15.
_LESS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """`numbers` [out, in] uint8 in 0..15; `factors` and `offsets` [out, in / 32] uint8.

    numbers * factors - offsets are int8 values; a row of them times its scale [out] is the
    weight's, spread.
    """

    numbers: Tensor
    factors: Tensor
    offsets: Tensor
    scales: Tensor

    def widened(self) -> Int8Weight:
        """Returns the same weight in int8."""
        values = torch.empty(self.numbers.shape, dtype=torch.int8)
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            factors, offsets = self.factors[rows, :, None], self.offsets[rows, :, None]
            grouped = self.numbers[rows].view(*factors.shape[:2], GROUP).to(torch.int16)
            grouped = grouped * factors - offsets.to(torch.int16)
            values[rows] = grouped.to(torch.int8).view(len(grouped), -1)
        return Int8Weight(values, self.scales)

    def row_sums(self) -> Tensor:
        """Returns the sums of the rows' int8 values: [out] int32."""
        grouped = self.numbers.view(*self.factors.shape, GROUP)
        sums = grouped.sum(dim=2, dtype=torch.int32) * self.factors.to(torch.int32)
        return (sums - GROUP * self.offsets.to(torch.int32)).sum(dim=1, dtype=torch.int32)


def may_be_int4(size_in: int) -> bool:
    """Returns whether a weight of `size_in` inputs divides into groups; else it is int8."""
    return size_in % GROUP == 0


def quantize_weight(weight: Tensor, scale: Tensor | None = None) -> Int4Weight:
    """Returns [out, in] spread and rounded to four bits; in % 32 == 0.

    `scale` [in] multiplies the columns first.
    """
    size_out, size_in = weight.shape
    numbers = torch.empty(weight.shape, dtype=torch.uint8)
    factors = torch.empty(size_out, size_in // GROUP, dtype=torch.uint8)
    offsets, scales = torch.empty_like(factors), torch.empty(size_out)
    # Piece by piece: an output matrix in float32, several times over, is gigabytes.
    for start in range(0, size_out, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        wide = spread(weight[rows], scale).view(-1, size_in // GROUP, GROUP)
        low, high = wide.aminmax(dim=2, keepdim=True)
        low = low.clamp_max_(0)  # offsets are not negative: numbers begin at 0 or below
        # Factors are to reach 15, and values to stay within -127..127.
        of_factors = (high - low).amax(dim=1, keepdim=True) / (_MOST_NUMBER * _MOST_FACTOR)
        row_scale = torch.maximum(of_factors, wide.abs().amax(dim=(1, 2), keepdim=True) / 120)
        row_scale.clamp_min_(_LEAST_PEAK)
        found, factor, offset = _best_groups(wide.div_(row_scale), (high - low) / row_scale)
        numbers[rows] = found.to(torch.uint8).view(-1, size_in)
        factors[rows], offsets[rows] = (
            factor[:, :, 0].to(torch.uint8),
            offset[:, :, 0].to(torch.uint8),
        )
        scales[rows] = row_scale[:, 0, 0]
    return Int4Weight(numbers, factors, offsets, scales)


def _best_groups(wide: Tensor, extent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers [rows, groups, 32], factors and offsets [rows, groups, 1], whole in float32.

    A few factors are tried for each group; the least squared error decides. `wide`
    [rows, groups, 32] is in units of the rows' scales; `extent` [rows, groups, 1] is the span of a
    group's numbers.
    """
    first = (extent / _MOST_NUMBER).round_()
    middle = (wide.amax(dim=2, keepdim=True) + wide.amin(dim=2, keepdim=True)) / 2
    best_error = torch.full_like(first, torch.inf)
    best_found, best_factor, best_offset = torch.zeros_like(wide), first, torch.zeros_like(first)
    for less in _LESS:
        factor = (first - less).clamp_(1, _MOST_FACTOR)
        offset = (factor * (_MOST_NUMBER / 2) - middle).round_().clamp_(0, 127)
        found = ((wide + offset) / factor).round_().clamp_(0, _MOST_NUMBER)
        # Numbers that reached an end pull the offset to where the others are best.
        offset = (found * factor - wide).mean(dim=2, keepdim=True).round_()
        offset = torch.maximum(offset, _MOST_NUMBER * factor - 127).clamp_(0, 127)
        found = ((wide + offset) / factor).round_().clamp_(0, _MOST_NUMBER)
        error = (found * factor).sub_(offset).sub_(wide).square_().sum(dim=2, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_found = torch.where(is_better, found, best_found)
        best_factor = torch.where(is_better, factor, best_factor)
        best_offset = torch.where(is_better, offset, best_offset)
    return best_found, best_factor, best_offset


def quantize(weight: Tensor, scale: Tensor | None = None) -> Int8Weight:
    """Returns [out, in] rounded to four bits, in int8; where no groups fit, to eight."""
    if not may_be_int4(weight.shape[1]):
        return quantize_to_int8(weight, scale)
    return quantize_weight(weight, scale).widened()


class Int4Ops(Int8Ops):
    """Multiplies as Int8Ops does, by weights rounded to four bits. Slow, and runs everywhere."""

    quantize = staticmethod(quantize)
