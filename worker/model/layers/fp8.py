"""FP8 products: weights in e4m3 with scales, inputs rounded to e4m3 as they come.

What a weight stands for is its values times their scales. The functions are the specification of
worker.model.cuda.fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import FP8

LARGEST = 448.0  # of e4m3
BLOCK = 128  # rows and columns of a weight that share a scale; columns of an input
LEAST_PEAK = 1e-10  # of numbers that share a scale: zeros would give none


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """How a weight's scales lie: one for each row, or for each BLOCK x BLOCK.

    `has_input_scale`: what it multiplies has one scale, measured when the checkpoint was made.
    """

    in_blocks: bool
    has_input_scale: bool = False


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """`values` [out, in] in e4m3; float32 `scales` [out], or [out / BLOCK, in / BLOCK].

    `input_scale` [1] is float32: of all numbers that the weight multiplies. Without it each row of
    them has its own; with blocks, each BLOCK of a row.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @property
    def in_blocks(self) -> bool:
        return self.scales.dim() == 2

    @property
    def group(self) -> int:
        """Columns of an input that share a scale."""
        return BLOCK if self.in_blocks else self.values.shape[1]


def quantize_rows(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns x [rows, size] in e4m3, and float32 scales [rows, size / group].

    With a given `scale` [1] numbers beyond LARGEST times it become that. What is not finite becomes
    NaN, with all that shares its scale.
    """
    groups = x.float().view(x.shape[0], -1, group)
    if scale is None:
        scales = groups.abs().amax(dim=2, keepdim=True).clamp_min(LEAST_PEAK) / LARGEST
    else:
        scales = scale + (groups * 0).sum(dim=2, keepdim=True)  # NaN where not all are finite
    values = (groups / scales).clamp(-LARGEST, LARGEST).to(FP8)
    return values.flatten(1), scales.squeeze(2).contiguous()


def saturated(x: Tensor) -> Tensor:
    """Returns x in e4m3: numbers beyond LARGEST become that, what is not finite NaN."""
    return torch.where(x.isinf(), torch.nan, x.clamp(-LARGEST, LARGEST)).to(FP8)


def multiply(values: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Returns float32 [rows, out] of what `quantize_rows` returned."""
    groups = values.float().view(*scales.shape, weight.group)
    rows = (groups * scales[..., None]).flatten(1)
    wide, by = weight.values.float(), weight.scales
    if weight.in_blocks:
        by = by.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        by = by[:, None]
    return functional.linear(rows, wide * by, None if bias is None else bias.float())
