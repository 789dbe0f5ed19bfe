"""Triton kernels of paged attention: tiles of queries over their sequences' blocks, with online
softmax (arXiv:2112.05682, arXiv:2205.14135).

The query heads that share a key head are rows of one tile, so that no key is read twice. Which
program computes which keys is read on the device (see `attention_plan`): a launch is the same for
all sequences of a padded batch, and can be part of a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.attention_plan import (
    BOUND,
    BOUND_UNIT,
    FIRST_SLOT,
    OWNER,
    PARTS,
    UNIT_BEGIN,
    UNIT_POSITION,
    UNIT_ROW,
    UNIT_START,
    UNIT_TOKEN,
    UNIT_TOKENS,
)
from worker.model.cuda.kernels.attention_scan import LOG2E, scan_chain


@triton.jit
def merged(best, total, acc, part_best, part_total, part_acc):
    """Returns what rows have found with what they found in further keys. The products are rounded
    alike wherever it is compiled."""
    new_best = tl.maximum(best, part_best)
    subtracted = tl.where(new_best == float("-inf"), 0.0, new_best)
    rescale = tl.exp2(best - subtracted)
    weight = tl.exp2(part_best - subtracted)
    total = tl.fma(part_total, weight, total * rescale)
    acc = tl.fma(part_acc, tl.broadcast_to(weight[:, None], acc.shape), acc * rescale[:, None])
    return new_best, total, acc


@triton.jit
def finished(best, total, acc, sinks, head, is_row, HAS_SINKS: tl.constexpr):
    """Returns the output of rows that have attended to all of their keys."""
    if HAS_SINKS:
        # A key without a value.
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        new_best = tl.maximum(best, sink)
        rescale = tl.exp2(best - new_best)
        total = tl.fma(total, rescale, tl.exp2(sink - new_best))
        acc = acc * rescale[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(
    do_not_specialize=["units", "programs", "table", "table_stride", "max_units", "num_programs"]
)
def attention(
    q,  # [T, heads, key_dim]
    keys,  # [blocks, block_size, kv_heads, key_dim], contiguous in the last two
    values,
    out,  # [T, heads, value_dim]
    partial,  # [slots, BLOCK_M, value_dim] float32
    partial_best,  # [slots, BLOCK_M] float32, base 2
    partial_total,
    units,  # see attention_plan
    programs,
    table,  # [S, max_blocks]
    sinks,  # [heads]; unused without HAS_SINKS
    scale,
    softcap,
    window,
    chunk,
    max_units,
    num_programs,
    q_stride,
    q_head_stride,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    out_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # keys, a multiple of BLOCK_N
    KEEPS_STEPS: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends with the queries of a step's units. Grid: (num_programs,).

    KEEPS_STEPS: each step of keys is scanned by itself and merged in order, so that it does not
    matter which programs did it. HAS_UNMASKED: keys that all queries of a unit attend to are
    scanned without masks.
    """
    program = tl.program_id(0)
    stride = num_programs + 1
    width = max_units + 1
    at = tl.load(programs + BOUND * stride + program)
    stop = tl.load(programs + BOUND * stride + program + 1)
    unit = tl.load(programs + BOUND_UNIT * stride + program)
    owner = tl.load(programs + OWNER * stride + program)
    all_steps = tl.load(programs + BOUND * stride + num_programs) // KV_HEADS
    kv_head = at // tl.maximum(all_steps, 1)
    token = tl.arange(0, BLOCK_M) // GROUP
    member = tl.arange(0, BLOCK_M) % GROUP
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    formula = (scale, softcap, window, chunk)
    while at < stop:
        of_unit = units + unit
        start = kv_head * all_steps + tl.load(of_unit + UNIT_START * width)
        unit_stop = kv_head * all_steps + tl.load(of_unit + UNIT_START * width + 1)
        until = tl.minimum(unit_stop, stop)
        is_whole = (at == start) & (until == unit_stop)
        owner = tl.where(at == start, program, owner)
        row = tl.load(of_unit + UNIT_ROW * width)
        first_token = tl.load(of_unit + UNIT_TOKEN * width)
        tokens = tl.load(of_unit + UNIT_TOKENS * width)
        first_position = tl.load(of_unit + UNIT_POSITION * width)
        begin_step = tl.load(of_unit + UNIT_BEGIN * width) - start
        is_row = token < tokens
        head = kv_head * GROUP + member
        queries = tl.load(
            q
            + (first_token + token).to(tl.int64)[:, None] * q_stride
            + (head * q_head_stride)[:, None]
            + key_dims[None, :],
            mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :],
            other=0.0,
        )
        position = first_position + token
        end = first_position + tokens
        cache = (
            keys + kv_head * KEY_DIM,
            values + kv_head * VALUE_DIM,
            table + row.to(tl.int64) * table_stride,
            key_block_stride,
            key_stride,
            value_block_stride,
            value_stride,
        )
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
        if KEEPS_STEPS:
            none_best, none_total, none_acc = best, total, acc
            slot = tl.load(programs + FIRST_SLOT * stride + owner) - start
            for step in range(at, until):
                begin = (begin_step + step) * STEP
                part_best, part_total, part_acc = scan_chain(
                    none_best,
                    none_total,
                    none_acc,
                    queries,
                    begin,
                    tl.minimum(begin + STEP, end),
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
                    HAS_UNMASKED=HAS_UNMASKED,
                    PRECISION=PRECISION,
                )
                if is_whole:
                    best, total, acc = merged(best, total, acc, part_best, part_total, part_acc)
                else:
                    store_part(
                        partial,
                        partial_best,
                        partial_total,
                        slot + step,
                        is_row,
                        part_best,
                        part_total,
                        part_acc,
                        VALUE_DIM=VALUE_DIM,
                        VALUE_WIDTH=VALUE_WIDTH,
                        BLOCK_M=BLOCK_M,
                    )
        else:
            begin = (begin_step + at) * STEP
            best, total, acc = scan_chain(
                best,
                total,
                acc,
                queries,
                begin,
                tl.minimum((begin_step + until) * STEP, end),
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
                HAS_UNMASKED=HAS_UNMASKED,
                PRECISION=PRECISION,
            )
            if not is_whole:
                store_part(
                    partial,
                    partial_best,
                    partial_total,
                    tl.load(programs + FIRST_SLOT * stride + owner) + program - owner,
                    is_row,
                    best,
                    total,
                    acc,
                    VALUE_DIM=VALUE_DIM,
                    VALUE_WIDTH=VALUE_WIDTH,
                    BLOCK_M=BLOCK_M,
                )
        if is_whole:
            result = finished(best, total, acc, sinks, head, is_row, HAS_SINKS=HAS_SINKS)
            tl.store(
                out
                + (first_token + token).to(tl.int64)[:, None] * out_stride
                + (head * VALUE_DIM)[:, None]
                + value_dims[None, :],
                result.to(out.dtype.element_ty),
                mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
            )
        at = until
        unit += 1
        if at == (kv_head + 1) * all_steps:
            kv_head += 1
            unit = 0


@triton.jit
def store_part(
    partial,
    partial_best,
    partial_total,
    slot,
    is_row,
    best,
    total,
    acc,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Keeps what the rows of a unit have found, until `merge_parts`."""
    dims = tl.arange(0, VALUE_WIDTH)
    at = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(partial_best + at, best, mask=is_row)
    tl.store(partial_total + at, total, mask=is_row)
    tl.store(
        partial + at[:, None] * VALUE_DIM + dims[None, :],
        acc,
        mask=is_row[:, None] & (dims < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["units", "programs", "max_units", "num_programs"])
def merge_parts(
    out,
    partial,
    partial_best,
    partial_total,
    units,
    programs,
    sinks,
    max_units,
    num_programs,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts whose loads are under way together
    HAS_SINKS: tl.constexpr,
):
    """Merges the parts of units that several programs computed, in the order of their keys.

    Grid: (num_programs, pieces of ROWS rows of a unit), as many as the largest unit has.
    """
    program = tl.program_id(0)
    stride = num_programs + 1
    width = max_units + 1
    parts = tl.load(programs + PARTS * stride + program)
    if parts == 0:
        return
    unit = tl.load(programs + BOUND_UNIT * stride + program + 1)
    tokens = tl.load(units + UNIT_TOKENS * width + unit)
    if tl.program_id(1) * ROWS >= tokens * GROUP:
        return
    all_steps = tl.load(programs + BOUND * stride + num_programs) // KV_HEADS
    kv_head = tl.load(programs + BOUND * stride + program + 1) // all_steps
    first_token = tl.load(units + UNIT_TOKEN * width + unit)
    first_slot = tl.load(programs + FIRST_SLOT * stride + program)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = place < tokens * GROUP
    dims = tl.arange(0, VALUE_WIDTH)
    inside = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        # All loads first, so that they do not wait for each other.
        loaded = ()
        for number in tl.static_range(AT_ONCE):
            is_part = begin + number < parts
            at = (first_slot + begin + number).to(tl.int64) * BLOCK_M + place
            part_best = tl.load(partial_best + at, mask=is_row & is_part, other=float("-inf"))
            part_total = tl.load(partial_total + at, mask=is_row & is_part, other=0.0)
            part_at = at[:, None] * VALUE_DIM + dims[None, :]
            part_acc = tl.load(partial + part_at, mask=inside & is_part, other=0.0)
            loaded += ((part_best, part_total, part_acc),)  # type: ignore[assignment]
        for number in tl.static_range(AT_ONCE):
            part_best, part_total, part_acc = loaded[number]
            best, total, acc = merged(best, total, acc, part_best, part_total, part_acc)
    head = kv_head * GROUP + place % GROUP
    result = finished(best, total, acc, sinks, head, is_row, HAS_SINKS=HAS_SINKS)
    tl.store(
        out
        + (first_token + place // GROUP).to(tl.int64)[:, None] * out_stride
        + (head * VALUE_DIM)[:, None]
        + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=inside,
    )
