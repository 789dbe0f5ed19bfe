"""How fast the queue empties, measured: what a refused caller is told to wait."""

from __future__ import annotations

import random
from collections import deque

WINDOW_S = 30.0
MAX_SAMPLES = 64
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 2.0
JITTER = 0.2


class DrainRate:
    """Jobs ended per second over the last half minute, from whatever totals come by."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)

    def observe(self, total_ended: int, now_s: float) -> None:
        """`now_s` is monotonic; samples closer than half a second are not kept."""
        if self._samples and now_s - self._samples[-1][0] < WINDOW_S / MAX_SAMPLES:
            return
        if self._samples and total_ended < self._samples[-1][1]:
            self._samples.clear()  # the server lost its counters
        self._samples.append((now_s, total_ended))
        while now_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def retry_after_s(self, num_queued: int) -> float:
        """Seconds until `num_queued` jobs have ended, within bounds, spread by up to a fifth."""
        wait_s = UNKNOWN_RETRY_S
        if len(self._samples) >= 2:
            (first_s, first_total), (last_s, last_total) = self._samples[0], self._samples[-1]
            ended = last_total - first_total
            wait_s = num_queued * (last_s - first_s) / ended if ended else MAX_RETRY_S
        wait_s = min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
        return min(MAX_RETRY_S, wait_s * (1.0 + JITTER * random.random()))
