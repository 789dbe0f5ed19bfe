"""Ops over oneDNN's weight layouts, by operators that torch keeps private: packed, and int8.

Int8 products have weights per output channel and activations per token, both symmetric. Weights are
quantized once, at load, from the model's dtype; activations in every product. Int8Ops is the
specification of the faster ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.layers.ops import Multiply, TorchOps

_LEAST_PEAK = 1e-10
_ROWS_AT_ONCE = 4096
# Packing depends on the number of rows it is made for. Packed for one, all numbers stay correct
# and decoding is fast; packed for many, a single row is slow.
_PACKED_FOR_ROWS = 1


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`values` [out, in] int8 in -127..127; a row times its scale [out] is the weight's row."""

    values: Tensor
    scales: Tensor


def quantize_weight(weight: Tensor) -> Int8Weight:
    """Returns [out, in] rounded to the nearest int8; the error is at most half a scale."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    # Piece by piece: an output matrix in float32, several times over, is gigabytes.
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        wide = weight[rows].float()
        scales[rows] = wide.abs().amax(dim=1).clamp_min(_LEAST_PEAK) / 127
        values[rows] = (wide / scales[rows, None]).round().to(torch.int8)
    return Int8Weight(values, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [rows, in] as uint8 around 128, and float32 scales [rows, 1].

    A scale is NaN where its row is not finite.
    """
    wide = x.float()
    peak = wide.abs().amax(dim=1, keepdim=True)
    bounded = torch.where(peak.isfinite(), peak, 1.0).clamp_min(_LEAST_PEAK)
    values = (wide.nan_to_num() * (127 / bounded) + 128).round().clamp(1, 255)
    scales = torch.where(peak.isfinite(), bounded / 127, torch.nan)
    return values.to(torch.uint8), scales


class Int8Ops(TorchOps):
    """Multiplies the whole numbers in float64, where they are exact. Slow, and runs everywhere."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        quantized = quantize_weight(weight)
        values = quantized.values

        def multiply(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
            rows, row_scales = quantize_rows(x)
            exact = functional.linear(rows.double() - 128, values.double())
            result = exact.float() * (row_scales * quantized.scales)
            return (result if bias is None else result + bias.float()).to(x.dtype)

        return multiply


class OneDnnInt8Ops(Int8Ops):
    """The same through oneDNN's kernels, which torch reaches by private operators.

    Activations are uint8 on purpose: for signed ones oneDNN has only its reference kernel on CPUs
    without AMX, two hundred times slower.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        quantized = quantize_weight(weight)
        packed = torch.ops.onednn.qlinear_prepack(quantized.values, None)
        scales, zeros = quantized.scales, torch.zeros(len(quantized.scales), dtype=torch.int64)
        wide_bias = bias.float() if bias is not None else None
        call: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise

        def multiply(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
            rows, row_scales = quantize_rows(x)
            result = call(
                rows, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            result *= row_scales
            return (result if wide_bias is None else result.add_(wide_bias)).to(x.dtype)

        return multiply


class PackedOps(TorchOps):
    """The packed tier: products over weights that were reordered once instead of at every call."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        call: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        kept_bias = bias.detach() if bias is not None else None
        return lambda x: call(x, packed, kept_bias, "none", [], "")
