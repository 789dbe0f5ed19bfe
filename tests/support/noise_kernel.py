"""A kernel that only writes the sampling kernels' noise down."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.gumbel import gumbel, row_key


@triton.jit
def noise_of(seed_keys, positions, token_ids, noise, size, BLOCK: tl.constexpr):
    """Writes [rows, size] float32, for rows of seed keys and positions, and token ids [size]."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    key = row_key(tl.load(seed_keys + row), tl.load(positions + row))
    ids = tl.load(token_ids + at, mask=at < size, other=0)
    tl.store(noise + row * size + at, gumbel(key, ids), mask=at < size)
