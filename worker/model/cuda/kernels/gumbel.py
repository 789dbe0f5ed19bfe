"""The noise of `worker.model.sampling.noise`, for Triton kernels: the same 62 bits, to the last."""

from __future__ import annotations

import triton
import triton.language as tl

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-62)
_MOST = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed_key, position):
    """Returns uint64: the key of a row's noise, as `row_keys`, from int64 numbers."""
    steps = (position + 1).to(tl.uint64, bitcast=True) * _STEP
    return _mix(seed_key.to(tl.uint64, bitcast=True) + steps)


@triton.jit
def gumbel(key, token_ids):
    """Returns float32 noise of int32 token ids, as `noise.gumbel`.

    log1p(-u) is log(1 - u), as rounded, and what the rounding took: there is no log1p that the
    interpreter knows. The second term is 0 from one half on and all there is below 2**-24.
    """
    x = _mix(key + (token_ids + 1).to(tl.uint64) * _STEP)
    bits = ((x >> 2) | 1).to(tl.int64)
    u = tl.minimum(bits.to(tl.float32) * _UNIT, _MOST)
    left = 1.0 - u
    lost = u - (1.0 - left)
    return -tl.log(lost + lost * u - tl.log(left))
