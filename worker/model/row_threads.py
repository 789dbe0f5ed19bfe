"""RowThreads: a function of independent rows of logits, computed by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from worker.model.sampling.row import SamplingRow

# Elements of a part. Parts go to the first free thread, so that a thread without a core holds up
# few rows; a batch of less than two is done sooner than another thread has woken.
_PART_ELEMENTS = 1 << 19

OfRows = Callable[[Tensor, Any], Tensor]  # of logits, and of what belongs to each of their rows


class RowThreads:
    """For where torch itself is kept to one thread; the caller is one of `num_threads`.

    Unlike the runtime's own threads, these sleep while they have nothing to do.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._executor = ThreadPoolExecutor(self._num_others, "rows") if self._num_others else None

    def map(self, function: OfRows, logits: Tensor, rows: Sequence[SamplingRow] | Tensor) -> Tensor:
        """Returns `function(logits, rows)`, [rows, ...]. Raises what it raises."""
        size = max(1, _PART_ELEMENTS // logits.shape[1])
        starts = range(0, len(rows), size)
        if self._executor is None or len(starts) < 2:
            return function(logits, rows)
        results: list[Tensor] = [logits] * len(starts)
        todo = iter(enumerate(starts))
        lock = threading.Lock()

        @torch.inference_mode()
        def work() -> None:
            while True:
                with lock:
                    part, start = next(todo, (-1, 0))
                if part < 0:
                    return
                these = slice(start, start + size)
                results[part] = function(logits[these], rows[these])

        others = [self._executor.submit(work) for _ in range(min(self._num_others, len(starts)))]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()
        return torch.cat(results)
