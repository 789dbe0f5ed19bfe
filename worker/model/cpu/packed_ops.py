"""The packed tier: weights in oneDNN's own layout, through operators that torch keeps private."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.model.layers.ops import Multiply, TorchOps, gated

# Packing depends on the number of rows it is made for. Packed for one, all numbers stay correct
# and decoding is fast; packed for many, a single row is slow.
_PACKED_FOR_ROWS = 1


class PackedOps(TorchOps):
    """Products over weights that were reordered once instead of at every call."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        call: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        kept_bias = bias.detach() if bias is not None else None
        return lambda x: call(x, packed, kept_bias, "none", [], "")

    def gated_linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return gated(self.linear(weight, bias))
