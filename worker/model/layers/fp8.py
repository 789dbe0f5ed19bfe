"""FP8 products: weights in e4m3 with scales, inputs rounded to e4m3 as they come.

What a weight stands for is its values times their scales. The functions are the specification of
worker.model.cuda.fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import FP8, Multiply
from worker.model.layers.linear_method import (
    LinearMethod,
    LinearShape,
    LinearWeights,
    Place,
    activated,
    bias_shard,
)
from worker.model.parallel.group import Placement

LARGEST = 448.0  # of e4m3
BLOCK = 128  # rows and columns of a weight that share a scale; columns of an input
_WIDTH = 16  # rows and columns that products come in, where rows have the scales
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

    With a given `scale` [1] numbers beyond LARGEST times it become that. Non-finite ones become
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
    """Returns x in e4m3: numbers beyond LARGEST become that, non-finite ones NaN."""
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


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """A layer's weight in e4m3; `bias` [out] is in the model's dtype."""

    weight: Fp8Weight
    bias: Tensor | None

    def shards(self, shape: LinearShape, prefix: str) -> Iterator[tuple[str, Place]]:
        weight = self.weight
        for name, part, rows in shape.rows():
            in_blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
            yield (
                f"{prefix}{name}.weight",
                Place(
                    weight.values[rows],
                    part,
                    shape.in_features,
                    weight.scales[in_blocks if weight.in_blocks else rows],
                    weight.input_scale,
                ),
            )
            yield from bias_shard(self.bias, shape, prefix + name, part, rows)


@dataclass(frozen=True, slots=True)
class Fp8Method(LinearMethod):
    """Keeps weights in e4m3 and multiplies by torch's operators; the specification of others."""

    layout: Fp8Layout

    def fits(self, shape: LinearShape) -> bool:
        """Returns whether FP8 products take this rank's part: whole blocks, or _WIDTH numbers."""
        if not self.layout.in_blocks:
            return not (shape.out_size % _WIDTH or shape.in_features.size % _WIDTH)
        shares = (*shape.parts.values(), shape.in_features)
        return not any(share.start % BLOCK or share.size % BLOCK for share in shares)

    def create(self, shape: LinearShape, placement: Placement) -> Fp8Weights:
        rows, columns = shape.out_size, shape.in_features.size
        in_blocks = self.layout.in_blocks
        scales = (rows // BLOCK, columns // BLOCK) if in_blocks else (rows,)
        wide = torch.float32
        weight = Fp8Weight(
            placement.empty(rows, columns, dtype=FP8),
            placement.empty(*scales, dtype=wide),
            placement.empty(1, dtype=wide).zero_() if self.layout.has_input_scale else None,
        )
        return Fp8Weights(weight, placement.empty(rows) if shape.adds_bias else None)

    def reference(self, shape: LinearShape, weights: LinearWeights) -> Multiply:
        assert isinstance(weights, Fp8Weights), "they were created here"
        return activated(fp8_linear(weights.weight, weights.bias), shape.activation)

    def product(
        self, shape: LinearShape, weights: LinearWeights, input_sizes: Tensor | None = None
    ) -> Multiply:
        return self.reference(shape, weights)


def fp8_linear(weight: Fp8Weight, bias: Tensor | None) -> Multiply:
    """Returns [rows, in] -> [rows, out], which rounds its input to FP8; bias [out] is in the
    model's dtype."""

    def multiplied(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        rounded = quantize_rows(x, weight.group, weight.input_scale)
        return multiply(*rounded, weight, bias).to(x.dtype)

    return multiplied
