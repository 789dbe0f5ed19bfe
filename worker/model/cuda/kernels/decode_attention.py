"""Attention of sequences with one query each, whose keys are split over programs."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.attention import LOG2E, scan_keys


@triton.jit(do_not_specialize=["num_splits", "seq_lens", "table", "table_stride"])
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
        # A key without a value, counted by the first of several splits.
        sink = tl.load(sinks + head, mask=is_member, other=0.0).to(tl.float32) * LOG2E
        is_counted = is_member & (split == 0)
        best = tl.where(is_counted, sink, best)
        total = tl.where(is_counted, 1.0, total)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    position = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    best, total, acc = scan_keys(
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
