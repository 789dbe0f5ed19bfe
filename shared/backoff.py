"""Backoff: the waits between the tries of something that fails."""

from __future__ import annotations

import asyncio
import random

_MAX_EXPONENT = 64  # keeps factor ** n a finite float; every delay has reached `max_s` long before


class Backoff:
    """Counts the failures in a row of one action, and waits longer after each of them.

    The delay is `first_s` after the first failure and grows by `factor` up to `max_s`. With a
    `jitter` of j a wait takes a random part of it, between 1 - j and 1: many clients of one server
    that came back do not return in the same moment.
    """

    def __init__(
        self, first_s: float, max_s: float, *, factor: float = 2.0, jitter: float = 0.0
    ) -> None:
        self.num_failures = 0
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._jitter = jitter

    def delay_s(self, num_failures: int) -> float:
        """Returns the seconds to wait after that many failures in a row (at least 1), no jitter."""
        exponent = min(num_failures - 1, _MAX_EXPONENT)
        return min(self._max_s, self._first_s * self._factor**exponent)

    def next_s(self) -> float:
        """Counts one more failure; returns the seconds to wait before the next try."""
        self.num_failures += 1
        delay_s = self.delay_s(self.num_failures)
        return delay_s * random.uniform(1 - self._jitter, 1) if self._jitter else delay_s

    async def wait(self) -> None:
        """Counts one more failure and sleeps."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Forgets the failures after a success: the next one waits `first_s`. Idempotent."""
        self.num_failures = 0
