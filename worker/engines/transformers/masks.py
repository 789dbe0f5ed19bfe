"""Which keys a layer attends to, read from the mask function that transformers makes for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.model.base import Reach

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskShape:
    """Stands for a mask: what `AttentionMaskInterface` gives to the function that would make it."""

    def __init__(self, mask_function: MaskFunction) -> None:
        self._mask_function = mask_function

    def reach(self, context_length: int) -> Reach | None:
        """Returns the Reach that this mask is, for sequences of up to `context_length` tokens; None
        where it is no causal mask of that kind.

        Computes on the CPU, whatever torch's default device is. Raises RuntimeError where the
        function's own tensors are elsewhere.
        """
        last = context_length - 1
        first = self._first_attended(last)
        reach = Reach()
        if first:
            if self._first_attended(last - 1) == first - 1:
                reach = Reach(window=last - first + 1)
            else:
                reach = Reach(chunk=first - self._first_attended(first - 1))
        width = reach.window or reach.chunk or 1
        rows = {0, 1, 2, width - 2, width - 1, width, width + 1, 2 * width, 2 * width + 1}
        rows |= {last // 2, last - 1, last}
        for query in sorted(row for row in rows if 0 <= row <= last):
            keys = torch.arange(min(query + 3, context_length), device="cpu")
            if not torch.equal(self._row(query, keys), reach.mask(keys.new_tensor(query), keys)):
                return None
        return reach

    def _row(self, query: int, keys: Tensor) -> Tensor:
        """Returns True where the query attends to a key, [keys]."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        mask = self._mask_function(zero, zero, zero + query, keys[None, None, None, :])
        return mask.expand(1, 1, 1, len(keys))[0, 0, 0]

    def _first_attended(self, query: int) -> int:
        """Returns the first key that the query attends to; the query's own place where none is."""
        attended = self._row(query, torch.arange(query + 1, device="cpu")).nonzero()
        return int(attended[0, 0]) if len(attended) else query
