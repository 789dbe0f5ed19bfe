"""Attention of whole prompts, tile by tile: there are enough of them for all multiprocessors."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.attention_scan import LOG2E, scan_chain


@triton.jit(do_not_specialize=["num_chunks", "cu_q", "seq_lens", "table", "table_stride"])
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
    tiles from above without their lengths; programs beyond them return at once.
    """
    tile_tokens: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tiles have most keys
    base = tl.load(cu_q)
    low = 0
    high = num_chunks
    while low < high:  # the last chunk whose first tile is not after this one
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
    cache = (
        keys + kv_head * KEY_DIM,
        values + kv_head * VALUE_DIM,
        table + row * table_stride,
        key_block_stride,
        key_stride,
        value_block_stride,
        value_stride,
    )
    best, total, acc = scan_chain(
        best,
        total,
        acc,
        queries,
        begin,
        end,
        first_position,
        position,
        is_row,
        cache,
        (scale, softcap, window, chunk),
        KEY_DIM=KEY_DIM,
        VALUE_DIM=VALUE_DIM,
        KEY_WIDTH=KEY_WIDTH,
        VALUE_WIDTH=VALUE_WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        HAS_SOFTCAP=HAS_SOFTCAP,
        HAS_WINDOW=HAS_WINDOW,
        HAS_CHUNK=HAS_CHUNK,
        HAS_UNMASKED=not (HAS_WINDOW or HAS_CHUNK),
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
