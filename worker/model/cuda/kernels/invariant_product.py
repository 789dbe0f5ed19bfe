"""invariant_product_kernel: a product whose rows have the same bits, however many there are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def invariant_product_kernel(
    x,  # [rows, IN], rows `x_stride` apart
    weight,  # [OUT, IN]
    bias,  # [OUT]; unused without HAS_BIAS
    out,  # [rows, OUT]
    num_rows,
    x_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes x @ weight.T + bias. Grid: (blocks of rows, blocks of OUT).

    One program sums up all of a number, block by block: nothing depends on the number of rows.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_column = columns < OUT
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + places[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * IN + places[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, IN, BLOCK_K):
        is_place = places < IN - begin
        left = tl.load(x_at + begin, mask=is_row[:, None] & is_place[None, :], other=0.0)
        right = tl.load(weight_at + begin, mask=is_column[None, :] & is_place[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * OUT + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
