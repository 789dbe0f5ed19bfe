"""FP8 products on CUDA: by torch where each row has a scale, by a kernel where blocks have one.

The twin is worker.model.layers.fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from worker.model.base import FP8, Activation, Multiply
from worker.model.cuda.kernels.fp8 import block_product_kernel, quantize_kernel
from worker.model.cuda.layers import Rounded, Rounding, gate, gate_rounded
from worker.model.layers import fp8
from worker.model.layers.fp8 import (
    BLOCK,
    LARGEST,
    LEAST_PEAK,
    Fp8Method,
    Fp8Weight,
    Fp8Weights,
)
from worker.model.layers.linear_method import LinearShape, LinearWeights
from worker.model.layers.ops import OPERATOR_ERRORS

_PLACES_A_PROGRAM = 1024  # of a row, in groups of BLOCK
_FEW_ROWS = 64


def quantize_rows(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Does what the twin of this name does."""
    rows, size = x.shape
    groups = size // group
    width = triton.next_power_of_2(group)
    at_once = max(1, _PLACES_A_PROGRAM // width)
    values = torch.empty((rows, size), dtype=FP8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    quantize_kernel[(rows, triton.cdiv(groups, at_once))](
        x,
        values,
        scales,
        scales if scale is None else scale,
        x.stride(0),
        SIZE=size,
        GROUP=group,
        WIDTH=width,
        GROUPS_A_PROGRAM=at_once,
        LARGEST=LARGEST,
        LEAST_PEAK=LEAST_PEAK,
        HAS_SCALE=scale is not None,
        num_warps=min(16, max(4, width // 512)),
    )
    return values, scales


def block_tiles(rows: int) -> tuple[int, int, int, int]:
    """Returns BLOCK_M, BLOCK_N, warps and stages of the kernel for products in blocks."""
    if rows <= 16:
        return 16, 64, 4, 4
    return (64, 64, 4, 4) if rows <= _FEW_ROWS else (128, 128, 8, 3)


def multiply_in_blocks(
    values: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns [rows, out] of what `quantize_rows` returned for groups of BLOCK."""
    rows, size_in = values.shape
    size_out = weight.values.shape[0]
    block_m, block_n, warps, stages = block_tiles(rows)
    out = torch.empty((rows, size_out), dtype=dtype, device=values.device)
    block_product_kernel[(size_out // block_n, triton.cdiv(rows, block_m))](
        values,
        scales,
        weight.values,
        weight.scales,
        out if bias is None else bias,
        out,
        rows,
        SIZE_IN=size_in,
        SIZE_OUT=size_out,
        GROUP=BLOCK,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HAS_BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """The twin's `fp8_linear`. The weight's sizes divide by 16, with blocks by BLOCK."""

    weight: Fp8Weight
    bias: Tensor | None

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.weight.group, self.weight.input_scale)

    def __call__(self, x: Tensor | Rounded) -> Tensor:
        """Maps [rows, in], which may be rounded before, to [rows, out]."""
        weight = self.weight
        if isinstance(x, Tensor):
            x = Rounded(*quantize_rows(x, weight.group, weight.input_scale), x.dtype)
        if weight.in_blocks:
            return multiply_in_blocks(x.values, x.scales, weight, self.bias, x.dtype)
        kind = functional.ScalingType.RowWise  # not imported above: older builds lack it
        return functional.scaled_mm(
            x.values,
            weight.values.t(),
            x.scales,
            kind,
            weight.scales[None],
            kind,
            bias=self.bias,
            output_dtype=x.dtype,
            use_fast_accum=True,  # the units' own sums: their numbers were rounded to e4m3
        )


@dataclass(frozen=True, slots=True)
class Fp8GatedProduct:
    """activation(gate) * up; gate is the product's first half."""

    product: Fp8Product
    activation: Activation

    def __call__(self, x: Tensor | Rounded) -> Tensor:
        return gate(self.product(x), self.activation)

    def rounded(self, x: Tensor | Rounded, rounding: Rounding) -> Rounded:
        """Returns what a product of that rounding takes, in one launch fewer."""
        return gate_rounded(self.product(x), self.activation, rounding)


class CudaFp8Method(Fp8Method):
    """Fp8Method by these products; CudaStack has norms and gates round their inputs."""

    def product(
        self, shape: LinearShape, weights: LinearWeights, input_sizes: Tensor | None = None
    ) -> Multiply:
        assert isinstance(weights, Fp8Weights), "they were created by Fp8Method"
        multiply = Fp8Product(weights.weight, weights.bias)
        activation = shape.activation
        return multiply if activation is None else Fp8GatedProduct(multiply, activation)


_SAMPLE = (3, 256, 128)  # rows, in, out
_TOLERANCE = 0.01  # a few roundings to bfloat16


@torch.inference_mode()
def unavailable_reason(device: torch.device) -> str | None:
    """Returns why FP8 products are unavailable on the device: they fail, or differ from the twin's.

    The operators are as new as the devices that have them; either may lack them.
    """
    rows, size_in, size_out = _SAMPLE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, size_in, generator=generator).to(device, torch.bfloat16)
    values = torch.randn(size_out, size_in, generator=generator).to(device, FP8)
    for shape in ((size_out,), (size_out // BLOCK, size_in // BLOCK)):
        scales = (torch.rand(shape, generator=generator) + 0.5).to(device)
        weight = Fp8Weight(values, scales)
        expected = fp8.fp8_linear(weight, None)(x).float()
        try:
            error = (Fp8Product(weight, None)(x).float() - expected).norm() / expected.norm()
        except OPERATOR_ERRORS as failure:
            return f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
        if not error <= _TOLERANCE:
            return f"products are off by {error:.2%}"
    return None
