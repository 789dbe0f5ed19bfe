"""InvariantOps: operations of a layer whose rows have the same bits in every batch.

cuBLAS chooses a kernel by the number of rows, and its kernels sum in different orders. Here one
kernel with one shape of tiles computes all products. The other operations compute each row by
itself anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.model.base import Activation, Multiply
from worker.model.cuda.kernels.invariant_product import invariant_product_kernel
from worker.model.cuda.layers import gate
from worker.model.cuda.stack import CudaOps

ROWS, COLUMNS = 64, 64  # of a tile: the fewest rows that Hopper's matrix instruction takes
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True, slots=True)
class InvariantProduct:
    """x @ weight.T + bias, [rows, in] -> [rows, out]; weight is [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, (size_out, size_in) = len(x), self.weight.shape
        out = torch.empty((num_rows, size_out), dtype=x.dtype, device=x.device)
        invariant_product_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(size_out, COLUMNS))](
            x,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            num_rows,
            x.stride(0),
            IN=size_in,
            OUT=size_out,
            BLOCK_M=ROWS,
            BLOCK_N=COLUMNS,
            BLOCK_K=inner_size(x.dtype),
            HAS_BIAS=self.bias is not None,
            PRECISION="tf32" if x.element_size() == 2 else "ieee",
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
        return out


class InvariantOps(CudaOps):
    """CudaOps with invariant products."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return InvariantProduct(weight, bias)

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        product = InvariantProduct(weight, bias)
        return lambda x: gate(product(x), activation)


def inner_size(dtype: torch.dtype) -> int:
    """Returns how many numbers of a row a tile has."""
    return 128 if dtype.itemsize == 2 else 32
