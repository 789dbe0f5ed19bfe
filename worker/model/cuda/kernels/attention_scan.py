"""scan_chain: the running softmax of a tile of queries over some of its keys.

Bfloat16 is widened right after a load wherever it is not an operand of `tl.dot`. Keys and values in
FP8 become the queries' dtype, which has all of its numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scan_keys(
    best,
    total,
    acc,
    q,
    begin,
    end,
    first_position,
    position,
    is_row,
    cache,
    formula,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the places [begin, end) to the running best score, total and sum of values of each row.

    Not IS_MASKED: they are whole tiles of BLOCK_N that all rows attend to. `cache`: keys and values
    of one head of one layer, the sequence's blocks, and the strides of both. `formula`: scale,
    softcap, window and chunk.
    """
    keys, values, table = cache[0], cache[1], cache[2]
    key_block_stride, key_stride = cache[3], cache[4]
    value_block_stride, value_stride = cache[5], cache[6]
    scale, softcap, window, chunk = formula[0], formula[1], formula[2], formula[3]
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    for start in range(begin, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        offset = places % BLOCK_SIZE
        if IS_MASKED:
            is_place = places < end
            # Before what the first row attends to are blocks that another sequence may have.
            if HAS_WINDOW:
                is_place = is_place & (places > first_position - window)
            if HAS_CHUNK:
                is_place = is_place & (places >= first_position // chunk * chunk)
            block = tl.load(table + places // BLOCK_SIZE, mask=is_place, other=0).to(tl.int64)
        else:
            block = tl.load(table + places // BLOCK_SIZE).to(tl.int64)
        key_at = (block * key_block_stride + offset * key_stride)[None, :] + key_dims[:, None]
        value_at = (block * value_block_stride + offset * value_stride)[:, None]
        value_at += value_dims[None, :]
        if IS_MASKED or KEY_DIM != KEY_WIDTH:
            is_key = (key_dims < KEY_DIM)[:, None]
            if IS_MASKED:
                is_key = is_key & is_place[None, :]
            k = tl.load(keys + key_at, mask=is_key, other=0.0)
        else:
            k = tl.load(keys + key_at)
        if k.dtype == tl.float8e4nv:
            k = k.to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = scores * (scale / softcap)
            small = tl.exp(-2.0 * tl.abs(scores))
            tanh = tl.where(scores >= 0, 1.0, -1.0) * (1.0 - small) / (1.0 + small)
            scores = tanh * (softcap * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        if IS_MASKED:
            attended = is_row[:, None] & is_place[None, :] & (places[None, :] <= position[:, None])
            if HAS_WINDOW:
                attended = attended & (places[None, :] > position[:, None] - window)
            if HAS_CHUNK:
                attended = attended & (places[None, :] // chunk == position[:, None] // chunk)
            scores = tl.where(attended, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has attended to nothing yet: -inf - -inf would be NaN.
        subtracted = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - subtracted[:, None])
        rescale = tl.exp2(best - subtracted)
        total = total * rescale + tl.sum(weights, 1)
        best = new_best
        if IS_MASKED or VALUE_DIM != VALUE_WIDTH:
            is_value = (value_dims < VALUE_DIM)[None, :]
            if IS_MASKED:
                is_value = is_value & is_place[:, None]
            v = tl.load(values + value_at, mask=is_value, other=0.0)
        else:
            v = tl.load(values + value_at)
        if v.dtype == tl.float8e4nv:
            v = v.to(q.dtype)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return best, total, acc


@triton.jit
def scan_chain(
    best,
    total,
    acc,
    q,
    begin,
    end,
    first_position,
    position,
    is_row,
    cache,
    formula,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Does what `scan_keys` does. HAS_UNMASKED: keys that all rows attend to, those before
    `first_position`, are scanned without masks."""
    masked_begin = begin
    if HAS_UNMASKED:
        masked_begin = tl.minimum(first_position // BLOCK_N * BLOCK_N, end)
        masked_begin = tl.maximum(masked_begin, begin)
        best, total, acc = scan_keys(
            best,
            total,
            acc,
            q,
            begin,
            masked_begin,
            first_position,
            position,
            is_row,
            cache,
            formula,
            KEY_DIM=KEY_DIM,
            VALUE_DIM=VALUE_DIM,
            KEY_WIDTH=KEY_WIDTH,
            VALUE_WIDTH=VALUE_WIDTH,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            HAS_SOFTCAP=HAS_SOFTCAP,
            HAS_WINDOW=HAS_WINDOW,
            HAS_CHUNK=HAS_CHUNK,
            IS_MASKED=False,
            PRECISION=PRECISION,
        )
    return scan_keys(
        best,
        total,
        acc,
        q,
        masked_begin,
        end,
        first_position,
        position,
        is_row,
        cache,
        formula,
        KEY_DIM=KEY_DIM,
        VALUE_DIM=VALUE_DIM,
        KEY_WIDTH=KEY_WIDTH,
        VALUE_WIDTH=VALUE_WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        HAS_SOFTCAP=HAS_SOFTCAP,
        HAS_WINDOW=HAS_WINDOW,
        HAS_CHUNK=HAS_CHUNK,
        IS_MASKED=True,
        PRECISION=PRECISION,
    )
