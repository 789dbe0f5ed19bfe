"""gemv_kernel: products of a few rows, fused with their norm, gate or residual.

A step of one sequence reads each weight once and computes next to nothing with it: its time is that
of its launches, one waiting for the other. So a norm is part of the product that it is for, a gate
and a sum of the one that they follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.layers import activated

SILU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def gemv_kernel(
    x,  # [ROWS, IN]
    weight,  # [OUT, IN]; with a gate [2 * OUT, IN], the gate's rows first
    bias,  # [OUT], with a gate [2 * OUT]; unused without HAS_BIAS
    norm_weight,  # [IN]; unused without HAS_NORM
    residual,  # [ROWS, OUT]; unused without HAS_RESIDUAL
    out,  # [ROWS, OUT]
    eps,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate; 0: no gate
):
    """Computes norm(x) @ weight.T + bias, its gate, and adds a residual. Grid: (blocks of OUT,).

    The norm's factor is the same for all of a row, and is multiplied in at the end.
    """
    columns = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_column = columns < OUT
    rows = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK_IN], tl.float32)
    at = weight + columns.to(tl.int64)[None, :, None] * IN
    # All tiles have three dimensions: each thread has the same places of all of them, and nothing
    # goes through shared memory before the end.
    for start in range(0, IN, BLOCK_IN):
        places = start + tl.arange(0, BLOCK_IN)[None, None, :]
        inside = places < IN
        mask = is_column[None, :, None] & inside
        by = tl.load(at + places, mask=mask, other=0.0).to(tl.float32)
        row = tl.load(x + rows[:, None, None] * IN + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            scale = tl.load(norm_weight + places, mask=inside, other=0.0).to(tl.float32)
            if ADDS_ONE:
                scale = 1.0 + scale
            row = row * scale
        acc += row * by
        if ACTIVATION != 0:
            by = tl.load(at + OUT * IN + places, mask=mask, other=0.0).to(tl.float32)
            acc_up += row * by
    result = tl.sum(acc, 2)
    up = tl.sum(acc_up, 2)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 2) / IN + eps)  # [ROWS, 1]
        result = result * factor
        up = up * factor
    kind = out.dtype.element_ty
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != 0:
            up += tl.load(bias + OUT + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    # Rounded where separate operators round.
    result = result.to(kind).to(tl.float32)
    if ACTIVATION != 0:
        result = activated(result, ACTIVATION == SILU).to(kind).to(tl.float32)
        result = result * up.to(kind).to(tl.float32)
    to = rows[:, None] * OUT + columns[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + to, mask=is_column[None, :], other=0.0).to(tl.float32)
    tl.store(out + to, result.to(kind), mask=is_column[None, :])
