"""Ops over oneDNN's weight layouts, by operators that torch keeps private: packed, and int8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.model.base import Multiply
from worker.model.layers.int4 import quantize as quantize_to_int4
from worker.model.layers.int8 import Int8Ops, balance, quantize_rows
from worker.model.layers.ops import Ops, TorchOps

# Packing depends on the number of rows it is made for. Packed for one, all numbers stay correct
# and decoding is fast; packed for many, a single row is slow.
_PACKED_FOR_ROWS = 1


class OneDnnInt8Ops(Int8Ops):
    """The same through oneDNN's kernels, which torch reaches by private operators.

    Activations are uint8 on purpose: for signed ones oneDNN has only its reference kernel on CPUs
    without AMX, two hundred times slower.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        scale = balance(weight, self._input_sizes)
        inverse = None if scale is None else 1 / scale
        quantized = self.quantize(weight, scale)
        packed = torch.ops.onednn.qlinear_prepack(quantized.values, None)
        scales, zeros = quantized.scales, torch.zeros(len(quantized.scales), dtype=torch.int64)
        wide_bias = bias.float() if bias is not None else None
        call: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise

        def multiply(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
            rows, row_scales = quantize_rows(x, inverse)
            result = call(
                rows, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            result *= row_scales
            return (result if wide_bias is None else result.add_(wide_bias)).to(x.dtype)

        return multiply


class OneDnnInt4Ops(OneDnnInt8Ops):
    """The same of weights that are rounded to four bits. They take the memory of int8."""

    quantize = staticmethod(quantize_to_int4)


class PackedOps(TorchOps):
    """The packed tier: products over weights that were reordered once instead of at every call."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        call: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        kept_bias = bias.detach() if bias is not None else None
        return lambda x: call(x, packed, kept_bias, "none", [], "")


# By quantization: the operations of the packed tier. The native tier has all of these, too.
PACKED_OPS: dict[str, Callable[[], Ops]] = {
    "none": PackedOps,
    "int8": OneDnnInt8Ops,
    "int4": OneDnnInt4Ops,
}
