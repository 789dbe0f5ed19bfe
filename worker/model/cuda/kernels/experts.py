"""Kernels of a mixture's experts: tokens sorted by expert, then one product for all experts.

The host never reads which experts have tokens: a grid has a program for every tile that there could
be, and those beyond the last tile end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.layers import activated

PLAIN, SILU, GELU_TANH, CLAMPED = (tl.constexpr(number) for number in range(4))


# Steps differ: kernels for each kind of number would be compiled in mid-answer.
@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs(
    experts,  # [pairs], of each token its experts in their order
    order,  # [pairs] int32, result: pairs by expert, then by number
    starts,  # [experts + 1] int32, result: where an expert's pairs begin in `order`
    num_pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sorts pairs of a token and its expert. Grid: (experts,)."""
    expert = tl.program_id(0)
    pairs = tl.arange(0, BLOCK)
    place = 0
    for begin in range(0, num_pairs, BLOCK):
        given = tl.load(experts + begin + pairs, mask=begin + pairs < num_pairs, other=EXPERTS)
        place += tl.sum((given < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    for begin in range(0, num_pairs, BLOCK):
        given = tl.load(experts + begin + pairs, mask=begin + pairs < num_pairs, other=EXPERTS)
        is_own = given == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place + rank, begin + pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, place)


@triton.jit
def _accumulated(
    x_at,
    weight_at,
    second_at,  # of the second half of a gated product
    is_row,
    is_column,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the sums of both halves [BLOCK_M, BLOCK_N] float32; of one where not IS_GATED."""
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, IN, BLOCK_K):
        rows = tl.load(x_at, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        first = tl.dot(rows, weight, first, input_precision=PRECISION)
        if IS_GATED:
            weight = tl.load(second_at, mask=is_column[None, :], other=0.0)
            second = tl.dot(rows, weight, second, input_precision=PRECISION)
            second_at += BLOCK_K
        x_at += BLOCK_K
        weight_at += BLOCK_K
    return first, second


@triton.jit
def _gated(gate, up, limit, alpha, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Returns activation(gate) * up of float32 numbers, rounded where torch's operators round."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = 1.0 + tl.minimum(tl.maximum(up, -limit), limit)
        small = tl.exp(-tl.abs(alpha * gate))
        return up * gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    else:
        return activated(gate, ACTIVATION == SILU).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["divisor"])
def experts_product(
    x,  # [pairs / divisor, in]
    weight,  # [experts, out, in]; of a gated product [experts, 2 * out, in]
    bias,  # [experts, out], or [experts, 2 * out]
    out,  # [pairs, out]
    order,  # as `sort_pairs` has it
    starts,
    limit,
    alpha,
    divisor,
    EXPERTS: tl.constexpr,
    EXPERTS_WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiplies each pair's row by its expert's weight. Grid: (tiles, column tiles).

    Tiles of one expert follow each other, so that its columns are read from memory once.
    """
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS_WIDTH)
    is_expert = numbers < EXPERTS
    begins = tl.load(starts + numbers, mask=is_expert, other=0)
    ends = tl.load(starts + numbers + 1, mask=is_expert, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    tile -= tl.sum(tl.where(numbers < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(numbers == expert, begins, 0), 0)
    end = tl.sum(tl.where(numbers == expert, ends, 0), 0)
    place = begin + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = place < end
    pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    inner = tl.arange(0, BLOCK_K)
    IS_GATED: tl.constexpr = ACTIVATION != PLAIN
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    weights = weight + expert.to(tl.int64) * (HALVES * OUT * IN)
    weight_at = weights + column[None, :] * IN + inner[:, None]
    first, second = _accumulated(
        x + (pair // divisor)[:, None] * IN + inner[None, :],
        weight_at,
        weight_at + OUT * IN,
        is_row,
        is_column,
        IN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        IS_GATED,
        PRECISION,
    )
    if HAS_BIAS:
        biases = bias + expert * (HALVES * OUT) + column
        first += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            second += tl.load(biases + OUT, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        first = _gated(first, second, limit, alpha, ACTIVATION, out.dtype.element_ty)
    at = out + pair[:, None] * OUT + column[None, :]
    tl.store(at, first.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["chosen"])
def sum_pairs(
    results,  # [tokens * chosen, size]
    weights,  # [tokens, chosen]
    out,  # [tokens, size]
    chosen,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a token's experts up, by their weights, in their order. Grid: (tokens, pieces)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(chosen):
        pair = token * chosen + number
        by = tl.load(weights + pair).to(tl.float32)
        result = tl.load(results + pair * SIZE + columns, mask=inside, other=0.0)
        total += by * result.to(tl.float32)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)
