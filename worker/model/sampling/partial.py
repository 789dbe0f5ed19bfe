"""PartialSample: a step's sample in which some rows are drawn later than others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampled, Sampler


class PartialSample:
    """Draws some of a step's rows, then the rest: what a grammar allows depends on tokens that the
    host does not know when the step is launched.

    `token_ids` [rows] int64 are all rows' tokens on the device, 0 until one is drawn.
    """

    def __init__(
        self, sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor
    ) -> None:
        """Takes logits [rows, vocab] and the step before's sample [n] int64, as `Sampler.sample`;
        both are read until the last row is drawn."""
        self._sampler = sampler
        self._logits = logits
        self.rows = rows
        self._previous = previous
        self.token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)

    def draw(self, places: Sequence[int]) -> Sampled:
        """Draws the rows at these places, one or more; returns them alone, in this order."""
        index = to_device(np.array(places, dtype=np.int64), self._logits.device)
        is_whole = len(places) == len(self.rows)
        logits = self._logits if is_whole else self._logits.index_select(0, index)
        sampled = self._sampler.sample(logits, [self.rows[i] for i in places], self._previous)
        self.token_ids.index_copy_(0, index, sampled.token_ids)
        return sampled
