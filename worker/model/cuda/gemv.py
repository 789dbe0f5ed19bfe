"""gemv: products of up to MAX_ROWS rows, fused with their norm, gate or residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from worker.model.base import Activation
from worker.model.cuda.kernels.gemv import GELU_TANH, SILU, gemv_kernel
from worker.model.cuda.layers import gate
from worker.model.layers.ops import Norm

MAX_ROWS = 4
_BLOCK_IN = 1024  # 16 bytes of a row of weights for each thread
_ACCUMULATORS = 32  # of a thread, 8 for each row and column: registers bound them


@dataclass(frozen=True, slots=True)
class Product:
    """x @ weight.T + bias, [rows, in] -> [rows, out]; weight is [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """activation(gate) * up, [rows, in] -> [rows, out / 2]; gate is the product's first half."""

    product: Product
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return gate(self.product(x), self.activation)


def gemv(
    x: Tensor,
    product: Product | GatedProduct,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns product(norm(x)) + residual of x [rows, in], in its dtype; rows are 1, 2 or 4.

    x and the residual are contiguous and stay as they are.
    """
    activation = 0
    if isinstance(product, GatedProduct):
        activation = int(SILU if product.activation == "silu" else GELU_TANH)
        product = product.product
    weight, bias = product.weight, product.bias
    rows, size = x.shape
    out_size = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
    columns = _ACCUMULATORS // 4 // rows
    if activation or out_size < 2048:  # a gate has two sums; few columns make few programs
        columns = max(1, columns // 2)
    gemv_kernel[(triton.cdiv(out_size, columns),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        x if residual is None else residual,
        out,
        0.0 if norm is None else norm.eps,
        ROWS=rows,
        IN=size,
        OUT=out_size,
        BLOCK_OUT=columns,
        BLOCK_IN=min(_BLOCK_IN, triton.next_power_of_2(size)),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        ADDS_ONE=norm is not None and norm.adds_one,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        num_warps=4,
    )
    return out
