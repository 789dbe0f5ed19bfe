"""Kernels of decoder layers around products and attention.

Arithmetic is float32; results are rounded once, where torch's operators round after each one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.fp8 import rounded, rounding_scale

_LARGEST = tl.constexpr(448.0)  # of e4m3


@triton.jit
def _as_cached(x, cache):
    """Returns x as the cache keeps it: in FP8 bounded by its largest number, non-finite values as
    NaN; else as it is."""
    if cache.dtype.element_ty == tl.float8e4nv:
        wide = x.to(tl.float32)
        bounded = tl.clamp(wide, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        bounded = tl.where(tl.abs(wide) == float("inf"), float("nan"), bounded)
        return bounded.to(tl.float8e4nv)
    else:
        return x


@triton.jit
def _normalize(row, weight, eps, SIZE: tl.constexpr, ADDS_ONE: tl.constexpr):
    """Returns row / rms(row) times the weight, or 1 + weight; both float32, [..., SIZE] padded."""
    mean_square = tl.sum(row * row, 0) / SIZE
    if ADDS_ONE:
        weight = 1.0 + weight
    return row * (1.0 / tl.sqrt(mean_square + eps)) * weight


@triton.jit
def add_norm_kernel(
    x,  # [rows, size]
    delta,
    weight,  # [size]
    delta_weight,
    summed,  # [rows, size]; may be x
    normed,  # in e4m3 where it is rounded
    scales,  # [rows, size / GROUP]
    input_scale,  # [1]
    eps,
    delta_eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    GROUP: tl.constexpr,  # of numbers that share a scale; 0: they are not rounded
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Computes Ops.add_norm, a row for each program, and rounds it as quantize_rows."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    row = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + start + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA_NORM:
            by = tl.load(delta_weight + columns, mask=inside, other=0.0).to(tl.float32)
            added = _normalize(added, by, delta_eps, SIZE, ADDS_ONE)
            added = added.to(summed.dtype.element_ty).to(tl.float32)
        # The normalised values are those that the residual stream keeps.
        stored = (row + added).to(summed.dtype.element_ty)
        tl.store(summed + start + columns, stored, mask=inside)
        row = stored.to(tl.float32)
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = _normalize(row, by, eps, SIZE, ADDS_ONE)
    if GROUP:
        # First rounded as it is between two launches: the products see the same numbers.
        wide = result.to(summed.dtype.element_ty).to(tl.float32)
        GROUP_WIDTH: tl.constexpr = WIDTH if GROUP == SIZE else GROUP
        wide = tl.reshape(wide, [WIDTH // GROUP_WIDTH, GROUP_WIDTH])
        peak, zeros = tl.max(tl.abs(wide), 1), tl.sum(wide * 0.0, 1)
        scale = rounding_scale(peak, zeros, input_scale, LARGEST, LEAST_PEAK, HAS_SCALE)
        small = tl.reshape(rounded(wide, scale[:, None], normed, LARGEST), [WIDTH])
        tl.store(normed + start + columns, small, mask=inside)
        groups = tl.arange(0, WIDTH // GROUP_WIDTH)
        at = scales + tl.program_id(0).to(tl.int64) * (SIZE // GROUP) + groups
        tl.store(at, scale, mask=groups < SIZE // GROUP)
    else:
        tl.store(normed + start + columns, result.to(normed.dtype.element_ty), mask=inside)


# Parts of a step's one transfer lie anywhere: kernels for each alignment would be compiled in
# mid-answer.
@triton.jit(do_not_specialize=["positions", "slots"])
def rotate_and_store_kernel(
    qkv,  # [T, (heads + 2 kv_heads) * dim]; its queries are rotated in place
    positions,  # [T]
    slots,  # [T]; -1: nothing is stored
    cosines,  # [positions, dim / 2]
    sines,
    query_weight,  # [dim]
    key_weight,
    keys,  # [blocks, block_size, kv_heads, dim]
    values,
    eps,
    qkv_stride,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_A_PROGRAM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
):
    """Rotates queries, stores keys and values. Grid: (T, groups of heads).

    Both halves of a head are loaded apart: one rotates the other.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_A_PROGRAM + tl.arange(0, HEADS_A_PROGRAM)
    places = tl.arange(0, HALF_WIDTH)
    is_half = places < HALF
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & is_half[None, :]
    at = qkv + token * qkv_stride + (head * DIM)[:, None] + places[None, :]
    raw_first = tl.load(at, mask=inside, other=0.0)
    raw_second = tl.load(at + HALF, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    if HAS_NORM:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM
        factor = 1.0 / tl.sqrt(mean_square + eps)
        query_first = tl.load(query_weight + places, mask=is_half, other=0.0).to(tl.float32)
        query_second = tl.load(query_weight + HALF + places, mask=is_half, other=0.0).to(tl.float32)
        key_first = tl.load(key_weight + places, mask=is_half, other=0.0).to(tl.float32)
        key_second = tl.load(key_weight + HALF + places, mask=is_half, other=0.0).to(tl.float32)
        by_first = tl.where(is_query[:, None], query_first[None, :], key_first[None, :])
        by_second = tl.where(is_query[:, None], query_second[None, :], key_second[None, :])
        if ADDS_ONE:
            by_first, by_second = 1.0 + by_first, 1.0 + by_second
        first = first * factor[:, None] * by_first
        second = second * factor[:, None] * by_second
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cosines + position * HALF + places, mask=is_half, other=0.0).to(tl.float32)
    sin = tl.load(sines + position * HALF + places, mask=is_half, other=0.0).to(tl.float32)
    rotated_first = (first * cos[None, :] - second * sin[None, :]).to(qkv.dtype.element_ty)
    rotated_second = (second * cos[None, :] + first * sin[None, :]).to(qkv.dtype.element_ty)
    tl.store(at, rotated_first, mask=inside & is_query[:, None])
    tl.store(at + HALF, rotated_second, mask=inside & is_query[:, None])
    slot = tl.load(slots + token)
    block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    key_at = keys + block * key_block_stride + offset * key_stride
    key_at = key_at + ((head - HEADS) * DIM)[:, None] + places[None, :]
    is_stored = inside & is_key[:, None] & (slot >= 0)
    tl.store(key_at, _as_cached(rotated_first, keys), mask=is_stored)
    tl.store(key_at + HALF, _as_cached(rotated_second, keys), mask=is_stored)
    value_at = values + block * value_block_stride + offset * value_stride
    value_at = value_at + ((head - HEADS - KV_HEADS) * DIM)[:, None] + places[None, :]
    is_stored = inside & (head >= HEADS + KV_HEADS)[:, None] & (slot >= 0)
    tl.store(value_at, _as_cached(raw_first, values), mask=is_stored)
    tl.store(value_at + HALF, _as_cached(raw_second, values), mask=is_stored)


@triton.jit(do_not_specialize=["slots"])
def store_kernel(
    source,  # [T, kv_heads, dim]
    slots,
    cache,  # [blocks, block_size, kv_heads, dim]
    source_stride,
    source_head_stride,
    block_stride,
    place_stride,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copies one head of one token, to FP8 where the cache has it. Grid: (T, kv_heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, WIDTH)
    slot = tl.load(slots + token)
    inside = (places < DIM) & (slot >= 0)
    at = source + token * source_stride + head * source_head_stride + places
    block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    to = cache + block * block_stride + offset * place_stride + head * DIM + places
    tl.store(to, _as_cached(tl.load(at, mask=inside, other=0.0), cache), mask=inside)


@triton.jit
def activated(gate, IS_SILU: tl.constexpr):
    """Returns silu(gate), or gelu(gate) in its tanh form, of float32 numbers."""
    inner = gate
    if not IS_SILU:  # 0.5 * (1 + tanh(x)) is the sigmoid of 2 x
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(inner))
    return gate * tl.where(inner >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated(both, columns, SIZE: tl.constexpr, IS_SILU: tl.constexpr):
    """Returns activation(gate) * up of columns of a row [2 * SIZE], in its type."""
    inside = columns < SIZE
    gate = tl.load(both + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded as it is between two operators: the products that follow see the same numbers.
    activation = activated(gate, IS_SILU).to(both.dtype.element_ty).to(tl.float32)
    return (activation * up).to(both.dtype.element_ty)


@triton.jit
def gate_kernel(
    both,  # [rows, 2 * size]
    out,  # [rows, size]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gated = _gated(both + row * 2 * SIZE, columns, SIZE, IS_SILU)
    tl.store(out + row * SIZE + columns, gated, mask=columns < SIZE)


@triton.jit
def gate_rounded_kernel(
    both,  # [rows, 2 * size]
    values,  # [rows, size], e4m3
    scales,  # [rows, size / GROUP]
    input_scale,  # [1]
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Gates as gate_kernel, and rounds as quantize_rows. Grid: (rows, tiles of BLOCK), or (rows, 1)
    where a row has one scale.

    Such a row is computed twice, first for its largest number: it has no room in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    both += row * 2 * SIZE
    values += row * SIZE
    if GROUP == SIZE:
        peaks = tl.zeros([BLOCK], tl.float32)
        zeros = tl.zeros([BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            wide = _gated(both, columns, SIZE, IS_SILU).to(tl.float32)
            peaks = tl.maximum(peaks, tl.abs(wide))
            zeros += wide * 0.0
        peak, zero = tl.max(peaks, 0), tl.sum(zeros, 0)
        scale = rounding_scale(peak, zero, input_scale, LARGEST, LEAST_PEAK, HAS_SCALE)
        for start in range(0, SIZE, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            wide = _gated(both, columns, SIZE, IS_SILU).to(tl.float32)
            tl.store(values + columns, rounded(wide, scale, values, LARGEST), mask=columns < SIZE)
        tl.store(scales + row, scale)
    else:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        wide = _gated(both, columns, SIZE, IS_SILU).to(tl.float32)
        wide = tl.reshape(wide, [BLOCK // GROUP, GROUP])
        peak, zeros = tl.max(tl.abs(wide), 1), tl.sum(wide * 0.0, 1)
        scale = rounding_scale(peak, zeros, input_scale, LARGEST, LEAST_PEAK, HAS_SCALE)
        small = tl.reshape(rounded(wide, scale[:, None], values, LARGEST), [BLOCK])
        tl.store(values + columns, small, mask=columns < SIZE)
        groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        at = scales + row * (SIZE // GROUP) + groups
        tl.store(at, scale, mask=groups < SIZE // GROUP)
