"""Logit bias and min_tokens: a few named logits of one row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from worker.model.sampling_row import SamplingRow
from worker.model.transfer import to_device


class LogitEdits:
    """Keeps each sequence's ids and values on the device until it is forgotten."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._stops: dict[int, Tensor] = {}

    def add_bias(self, logits: Tensor, row: SamplingRow) -> None:
        """Adds to logits [vocab] (float32) in place. All ids are inside the vocabulary."""
        bias = row.params.logit_bias
        if not bias:
            return
        if row.seq_id not in self._biases:
            ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
            values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
            self._biases[row.seq_id] = (
                to_device(ids, self._device),
                to_device(values, self._device),
            )
        ids_there, values_there = self._biases[row.seq_id]
        logits.index_add_(0, ids_there, values_there)

    def suppress_stops(self, logits: Tensor, row: SamplingRow) -> None:
        """Until `min_tokens` are out, makes the tokens that would end the sequence impossible."""
        if row.num_outputs >= row.params.min_tokens:
            return
        if row.seq_id not in self._stops:
            ids = set(row.params.stop_token_ids)
            if not row.params.ignore_eos:
                ids |= self._eos_token_ids
            inside = sorted(token_id for token_id in ids if token_id < self._vocab_size)
            self._stops[row.seq_id] = to_device(np.array(inside, dtype=np.int64), self._device)
        logits.index_fill_(0, self._stops[row.seq_id], -torch.inf)

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._biases.pop(seq_id, None)
            self._stops.pop(seq_id, None)
