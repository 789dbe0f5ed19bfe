"""Random numbers without a state: a pure function of (seed, position, token id).

The counter of a SplitMix64 stream (Steele, Lea, Flood 2014) is the token id; the stream's key mixes
seed and position. The same integers come out on every device and in every batch, so a row draws the
same token alone and among others, and an interrupted stream continues unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Returns the same 64 bits as torch's int64 reads them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def seed_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Returns what each seed contributes to the keys of its rows, [seeds]."""
    return _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + np.uint64(_STEP))


def row_keys(keys_of_seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the key of each row's noise, [rows], from `seed_keys` and positions, [rows] each."""
    steps = (positions + 1).view(np.uint64) * np.uint64(_STEP)
    return _mix(keys_of_seeds + steps).view(np.int64)


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns 62 random bits, int64 [rows, n], for keys [rows, 1] and token ids [n], int64."""
    x = keys + (token_ids + 1) * _signed(_STEP)  # int64 arithmetic wraps, as the hash wants
    x = x ^ _shift_right(x, 30)
    x = x * _signed(_MIX_1)
    x = x ^ _shift_right(x, 27)
    x = x * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 2)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, finite float32 [rows, n], for int64 keys [rows, 1] and token
    ids [n]; or [n] for n of both.

    The integer is converted whole, so that small uniforms keep all 24 bits of precision: they make
    the large values that win. `log1p` keeps them too, where `log(1 - u)` would be 0. The clamp
    takes away the one u that rounds to 1 and would make a token impossible.
    """
    bits = random_bits(keys, token_ids) | 1
    u = (bits.to(torch.float32) * 2.0**-62).clamp_(max=1.0 - 2.0**-24)
    return torch.log1p(-u).neg_().log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Returns int64 x [...] shifted right without its sign, which torch's own shift keeps."""
    return (x >> count) & ((1 << (64 - count)) - 1)


_LN_2 = math.log(2)
_BITS = 62  # of a random number
# float32 bits as an integer are 2**23 times the logarithm of the number, within 0.09 below it, and
# the exponent's bias more.
_PER_UNIT = np.float32(-_LN_2 / 2**23)
_OFFSET = _LN_2 * (127 + _BITS)
_SLACK = 0.02  # more than what rounding may take from a bound
_CHUNK = 1 << 15  # elements computed at once: they stay in a core's cache


class HostNoise:
    """Finds the few tokens of a row that can have the largest sum of score and noise.

    Most tokens are far from winning, which a bound of their noise shows: it takes no logarithms.
    Instances are for one thread.
    """

    def __init__(self, counters: NDArray[np.uint64]) -> None:
        """`counters` are those of the vocabulary's tokens, which threads may share."""
        self._counters = counters
        self._bits = np.empty(_CHUNK, dtype=np.uint64)
        self._shifted = np.empty(_CHUNK, dtype=np.uint64)
        self._bounds = np.empty(len(counters), dtype=np.float32)

    @staticmethod
    def counters(vocab_size: int) -> NDArray[np.uint64]:
        return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_STEP)

    def may_win(self, scores: NDArray[np.float32], key: np.int64) -> NDArray[np.int64]:
        """Returns the tokens, in ascending order, among which the largest of score and `gumbel`
        is, for scores [vocab] whose largest is 0; at least one."""
        bounds = self._bounds
        for begin in range(0, len(scores), _CHUNK):
            end = min(begin + _CHUNK, len(scores))
            self._bound(scores, key, begin, end)
        best = int(bounds.argmax())
        bits = int(self._random_bits(key, best, best + 1)[0]) | 1
        uniform = min(bits * 2.0**-_BITS, 1.0 - 2.0**-24)
        value = float(scores[best]) - math.log(-math.log1p(-uniform))
        return np.flatnonzero(bounds >= np.float32(value - _OFFSET - _SLACK))

    def _bound(self, scores: NDArray[np.float32], key: np.int64, begin: int, end: int) -> None:
        """Fills in the bounds of tokens [begin, end), _OFFSET less.

        -log(u) is at least -log(-log1p(-u)), and less by a part of the bits' information.
        """
        bounds = self._bounds[begin:end]
        bits = self._random_bits(key, begin, end)
        np.copyto(bounds, bits.view(np.int64), casting="same_kind")
        np.copyto(bounds, bounds.view(np.int32), casting="same_kind")
        np.multiply(bounds, _PER_UNIT, out=bounds)
        np.add(bounds, scores[begin:end], out=bounds)

    def _random_bits(self, key: np.int64, begin: int, end: int) -> NDArray[np.uint64]:
        """Returns what `random_bits` does for tokens [begin, end), at most _CHUNK of them."""
        x, shifted = self._bits[: end - begin], self._shifted[: end - begin]
        np.add(self._counters[begin:end], key.view(np.uint64), out=x)
        for count, factor in ((30, _MIX_1), (27, _MIX_2)):
            np.right_shift(x, np.uint64(count), out=shifted)
            np.bitwise_xor(x, shifted, out=x)
            np.multiply(x, np.uint64(factor), out=x)
        np.right_shift(x, np.uint64(31), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.right_shift(x, np.uint64(2), out=x)
        return x
