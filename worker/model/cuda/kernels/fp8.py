"""Kernels of FP8 products: inputs to e4m3, and products whose weights have scales in blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounding_scale(peak, zeros, input_scale, LARGEST, LEAST_PEAK, HAS_SCALE: tl.constexpr):
    """Returns the scale of numbers whose largest is `peak`; `zeros`, their sum times zero, is NaN
    where not all are finite: neither the largest nor the bounds would show it."""
    scale = tl.load(input_scale) if HAS_SCALE else tl.maximum(peak, LEAST_PEAK) / LARGEST
    return scale + zeros


@triton.jit
def rounded(wide, scale, values, LARGEST):
    """Returns float32 numbers by their scale in the type of `values`, e4m3."""
    scaled = tl.clamp(wide / scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(values.dtype.element_ty)


# How many rows a step has changes: kernels for each divisor would be compiled in mid-answer.
@triton.jit
def quantize_kernel(
    x,  # [rows, size]
    values,  # [rows, size], e4m3
    scales,  # [rows, size / GROUP]
    input_scale,  # [1]
    x_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS_A_PROGRAM: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Rounds groups of a row to e4m3 by a scale of their own. Grid: (rows, groups' groups)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS_A_PROGRAM + tl.arange(0, GROUPS_A_PROGRAM)
    places = tl.arange(0, WIDTH)
    columns = (group * GROUP)[:, None] + places[None, :]
    inside = (places < GROUP)[None, :] & (columns < SIZE)
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    peak, zeros = tl.max(tl.abs(wide), 1), tl.sum(wide * 0.0, 1)
    scale = rounding_scale(peak, zeros, input_scale, LARGEST, LEAST_PEAK, HAS_SCALE)
    result = rounded(wide, scale[:, None], values, LARGEST)
    tl.store(values + row * SIZE + columns, result, mask=inside)
    tl.store(scales + row * (SIZE // GROUP) + group, scale, mask=group < SIZE // GROUP)


@triton.jit(do_not_specialize=["num_rows"])
def block_product_kernel(
    x,  # [rows, in], e4m3
    x_scales,  # [rows, in / GROUP]
    weight,  # [out, in], e4m3
    weight_scales,  # [out / GROUP, in / GROUP]
    bias,  # [out]
    out,  # [rows, out]
    num_rows,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiplies x by the weight. Grid: (tiles of out, tiles of rows).

    A tile is [BLOCK_N, BLOCK_M], out first: the matrix units take 64 of the weight's rows, and few
    of x's. BLOCK_N divides GROUP. What the units sum up without float32's precision is one GROUP.
    """
    GROUPS: tl.constexpr = SIZE_IN // GROUP
    first_out = tl.program_id(0) * BLOCK_N
    outs = first_out + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    places = tl.arange(0, GROUP)
    weight_at = weight + outs.to(tl.int64)[:, None] * SIZE_IN + places[None, :]
    x_at = x + rows.to(tl.int64)[None, :] * SIZE_IN + places[:, None]
    x_scale_at = x_scales + rows.to(tl.int64) * GROUPS
    weight_scale_at = weight_scales + (first_out // GROUP) * GROUPS
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(GROUPS):
        by_out = tl.load(weight_at + group * GROUP)
        by_row = tl.load(x_at + group * GROUP, mask=is_row[None, :], other=0.0)
        scale = tl.load(x_scale_at + group, mask=is_row, other=0.0)
        scale = scale * tl.load(weight_scale_at + group)
        total += tl.dot(by_out, by_row) * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outs).to(tl.float32)[:, None]
    out_at = out + rows.to(tl.int64)[None, :] * SIZE_OUT + outs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[None, :])
