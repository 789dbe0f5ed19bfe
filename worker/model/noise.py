"""Random numbers without a state: a pure function of (seed, position, token id).

The counter of a SplitMix64 stream (Steele, Lea, Flood 2014) is the token id; the stream's key mixes
seed and position. The same integers come out on every device and in every batch, so a row draws the
same token alone and among others, and an interrupted stream continues as if nothing had happened.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: int) -> int:
    value ^= value >> 30
    value = value * _MIX_1 & _MASK
    value ^= value >> 27
    value = value * _MIX_2 & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """The key of one row's noise, as a signed 64-bit integer."""
    key = _mix((seed & _MASK) + _STEP & _MASK)
    return _signed(_mix(key + (position + 1) * _STEP & _MASK))


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """62 random bits for each pair; int64 both, broadcast against one another."""
    x = keys + (token_ids + 1) * _signed(_STEP)  # int64 arithmetic wraps, as the hash wants
    x = x ^ _shift_right(x, 30)
    x = x * _signed(_MIX_1)
    x = x ^ _shift_right(x, 27)
    x = x * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 2)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, finite.

    The integer is converted whole, so that small uniforms keep all 24 bits of precision: they make
    the large values that win. `log1p` keeps them too, where `log(1 - u)` would be 0. The clamp
    takes away the one u that rounds to 1 and would make a token impossible.
    """
    bits = random_bits(keys, token_ids) | 1
    u = (bits.to(torch.float32) * 2.0**-62).clamp_(max=1.0 - 2.0**-24)
    return torch.log1p(-u).neg_().log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
