"""Triton kernels of paged attention: a tile of queries over its sequence's blocks, with online
softmax (arXiv:2112.05682, arXiv:2205.14135).

The query heads that share a key head are rows of one tile, so that no key is read twice. Lengths
and block tables are read on the device: a launch is the same for all sequences of a padded batch,
and can be part of a CUDA graph.

Bfloat16 is widened right after a load wherever it is not an operand of `tl.dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scan(
    best,
    total,
    acc,
    q,
    begin,
    end,
    position,
    is_row,
    keys,
    values,
    table,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    scale,
    softcap,
    window,
    chunk,
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

    Not IS_MASKED: they are whole tiles of BLOCK_N that all rows attend to. `keys` and `values`
    point at one head of one layer, `table` at the sequence's blocks.
    """
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    for start in range(begin, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        offset = places % BLOCK_SIZE
        if IS_MASKED:
            is_place = places < end
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
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return best, total, acc


@triton.jit(do_not_specialize=["num_splits"])
def decode_attention(
    q,  # [S, heads, key_dim]
    keys,  # [blocks, block_size, kv_heads, key_dim], contiguous in the last two
    values,
    out,  # [S, heads, value_dim]
    partial,  # [S, heads, num_splits, value_dim] float32; unused with one split
    partial_best,  # [S, heads, num_splits] float32, base 2
    partial_total,
    seq_lens,  # [S]; 0: padding, whose row of `out` becomes 0
    table,  # [S, max_blocks]
    sinks,  # [heads]; unused without HAS_SINKS
    scale,
    softcap,
    window,
    chunk,
    num_splits,
    q_stride,
    q_head_stride,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    out_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends with the last token of each sequence. Grid: (S, kv_heads, num_splits)."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row)
    members = tl.arange(0, BLOCK_M)
    is_member = members < GROUP
    head = kv_head * GROUP + members
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    queries = tl.load(
        q + row.to(tl.int64) * q_stride + (head * q_head_stride)[:, None] + key_dims[None, :],
        mask=is_member[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first, length - window)
    if HAS_CHUNK:
        first = tl.maximum(first, tl.maximum(length - 1, 0) // chunk * chunk)
    begin = first // BLOCK_N * BLOCK_N
    end = length
    if IS_SPLIT:
        part = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin = begin + split * part
        end = tl.minimum(end, begin + part)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A key without a value. Of several splits the first one counts it.
        sink = tl.load(sinks + head, mask=is_member, other=0.0).to(tl.float32) * LOG2E
        is_counted = is_member & (split == 0)
        best = tl.where(is_counted, sink, best)
        total = tl.where(is_counted, 1.0, total)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    position = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    best, total, acc = _scan(
        best,
        total,
        acc,
        queries,
        begin,
        end,
        position,
        is_member,
        keys + kv_head * KEY_DIM,
        values + kv_head * VALUE_DIM,
        table + row.to(tl.int64) * table_stride,
        key_block_stride,
        key_stride,
        value_block_stride,
        value_stride,
        scale,
        softcap,
        window,
        chunk,
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
    is_stored = is_member[:, None] & (value_dims < VALUE_DIM)[None, :]
    if IS_SPLIT:
        place = (row.to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(
            partial + place[:, None] * VALUE_DIM + value_dims[None, :],
            acc,
            mask=is_stored,
        )
        tl.store(partial_best + place, best, mask=is_member)
        tl.store(partial_total + place, total, mask=is_member)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + row.to(tl.int64) * out_stride + (head * VALUE_DIM)[:, None] + value_dims[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_stored,
        )


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    out,  # [S, heads, value_dim]
    partial,
    partial_best,
    partial_total,
    num_splits,
    out_stride,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Combines what the splits of `decode_attention` found. Grid: (S, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, VALUE_WIDTH)
    is_split = split < num_splits
    place = (row * HEADS + head) * num_splits + split
    best = tl.load(partial_best + place, mask=is_split, other=float("-inf"))
    highest = tl.max(best, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # of padding: its totals are 0
    weight = tl.exp2(best - highest)
    total = tl.sum(tl.load(partial_total + place, mask=is_split, other=0.0) * weight, 0)
    parts = tl.load(
        partial + place[:, None] * VALUE_DIM + dims[None, :],
        mask=is_split[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    summed = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row * out_stride + head * VALUE_DIM + dims,
        summed.to(out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_attention(
    q,  # [T, heads, key_dim]
    keys,
    values,
    out,  # [T, heads, value_dim]
    cu_q,  # [chunks + 1] where each chunk's queries begin
    seq_lens,  # [chunks]
    table,  # [chunks, max_blocks]
    sinks,
    scale,
    softcap,
    window,
    chunk,
    num_chunks,
    q_stride,
    q_head_stride,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    out_stride,
    table_stride,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends with chunks of prompts. Grid: (kv_heads, tokens // tile + chunks), tiles in order.

    A tile is BLOCK_M // GROUP tokens of one chunk. The grid's second size bounds the number of
    tiles from above without their lengths; what is too many returns at once.
    """
    tile_tokens: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tiles have most keys
    base = tl.load(cu_q)
    low = 0
    high = num_chunks
    while low < high:  # the last chunk whose first tile is not behind this one
        middle = (low + high) // 2
        if (tl.load(cu_q + middle) - base) // tile_tokens + middle <= number:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    first_token = tl.load(cu_q + row)
    num_queries = tl.load(cu_q + row + 1) - first_token
    tile = number - ((first_token - base) // tile_tokens + row)
    if tile * tile_tokens >= num_queries:
        return
    length = tl.load(seq_lens + row)
    members = tl.arange(0, BLOCK_M)
    token = tile * tile_tokens + members // GROUP
    head = kv_head * GROUP + members % GROUP
    is_row = (token < num_queries) & (members < tile_tokens * GROUP)
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    queries = tl.load(
        q
        + (first_token + token).to(tl.int64)[:, None] * q_stride
        + (head * q_head_stride)[:, None]
        + key_dims[None, :],
        mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    position = length - num_queries + token
    first_position = length - num_queries + tile * tile_tokens
    end = tl.minimum(length, first_position + tile_tokens)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first, first_position - window + 1)
    if HAS_CHUNK:
        first = tl.maximum(first, first_position // chunk * chunk)
    begin = first // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        best = tl.where(is_row, sink, best)
        total = tl.where(is_row, 1.0, total)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    keys += kv_head * KEY_DIM
    values += kv_head * VALUE_DIM
    table += row.to(tl.int64) * table_stride
    middle_end = begin
    if not (HAS_WINDOW or HAS_CHUNK):
        # Every query of the tile attends to all of these: no masks.
        middle_end = first_position // BLOCK_N * BLOCK_N
        best, total, acc = _scan(
            best,
            total,
            acc,
            queries,
            begin,
            middle_end,
            position,
            is_row,
            keys,
            values,
            table,
            key_block_stride,
            key_stride,
            value_block_stride,
            value_stride,
            scale,
            softcap,
            window,
            chunk,
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
    best, total, acc = _scan(
        best,
        total,
        acc,
        queries,
        middle_end,
        end,
        position,
        is_row,
        keys,
        values,
        table,
        key_block_stride,
        key_stride,
        value_block_stride,
        value_stride,
        scale,
        softcap,
        window,
        chunk,
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
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out
        + (first_token + token).to(tl.int64)[:, None] * out_stride
        + (head * VALUE_DIM)[:, None]
        + value_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
