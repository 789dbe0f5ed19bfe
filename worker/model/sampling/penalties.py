"""Repetition, presence and frequency penalties, counted on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow

_FIRST_CAPACITY = 4


class PenaltyTable:
    """Token counts of the sequences that have penalties; no memory until one does.

    At most `max_rows` sequences at once. A sequence that was pushed out by others is counted again
    from its tokens when it comes back, so the bound costs time, never correctness.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._row_of: OrderedDict[int, int] = OrderedDict()  # by seq_id, least recent first
        self._num_counted: dict[int, int] = {}  # output tokens already in the counts
        self._free: list[int] = []

    def apply(
        self, logits: Tensor, indices: Sequence[int], rows: Sequence[SamplingRow], sampled: Tensor
    ) -> None:
        """Changes logits [n, vocab] (float32) in place at `indices`, one for each of `rows`.

        `sampled` is the step before's sample, which rows with a token in flight point into.
        """
        if not rows:
            return
        wanted = {row.seq_id for row in rows}
        slots = []
        for row in rows:
            slots.append(self._slot(row, wanted))
            self._count(row, slots[-1], sampled)
        index = to_device(np.array([indices, slots], dtype=np.int64), self._device)
        amounts = to_device(
            np.array(
                [
                    (
                        row.params.repetition_penalty,
                        row.params.presence_penalty,
                        row.params.frequency_penalty,
                    )
                    for row in rows
                ],
                dtype=np.float32,
            ),
            self._device,
        )
        repetition, presence, frequency = amounts.unsqueeze(-1).unbind(1)
        counts = self._output_counts.index_select(0, index[1])
        is_output = counts > 0
        is_seen = is_output | self._in_prompt.index_select(0, index[1])
        part = logits.index_select(0, index[0])
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(is_seen, repeated, part)
        part -= frequency * counts
        part -= presence * is_output
        logits.index_copy_(0, index[0], part)

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            slot = self._row_of.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
                del self._num_counted[seq_id]

    def _slot(self, row: SamplingRow, wanted: set[int]) -> int:
        """Returns the sequence's row in the table, made from its prompt where it has none."""
        slot = self._row_of.get(row.seq_id)
        if slot is not None:
            self._row_of.move_to_end(row.seq_id)
            return slot
        if not self._free:
            self._free_slot(wanted)
        slot = self._free.pop()
        self._row_of[row.seq_id] = slot
        self._num_counted[row.seq_id] = 0
        self._output_counts[slot].zero_()
        self._in_prompt[slot].zero_()
        self._in_prompt[slot].index_fill_(0, self._ids(row.prompt_token_ids), True)
        return slot

    def _count(self, row: SamplingRow, slot: int, sampled: Tensor) -> None:
        """Counts a row's new outputs; `sampled` [rows] int64 are the step before's tokens."""
        counted = self._num_counted[row.seq_id]
        counts = self._output_counts[slot]
        if counted < len(row.output_token_ids):
            new = self._ids(row.output_token_ids[counted:])
            counts.index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
            counted = len(row.output_token_ids)
        if row.in_flight is not None and counted < row.num_outputs:
            token = sampled[row.in_flight : row.in_flight + 1]
            counts.index_add_(0, token, torch.ones_like(token, dtype=torch.int32))
            counted += 1
        self._num_counted[row.seq_id] = counted

    def _free_slot(self, wanted: set[int]) -> None:
        capacity = self._output_counts.shape[0]
        if capacity < self._max_rows:
            grown = min(max(2 * capacity, _FIRST_CAPACITY), self._max_rows)
            padding = (0, 0, 0, grown - capacity)
            self._output_counts = torch.nn.functional.pad(self._output_counts, padding)
            self._in_prompt = torch.nn.functional.pad(self._in_prompt, padding)
            self._free.extend(range(capacity, grown))
            return
        oldest = next((seq_id for seq_id in self._row_of if seq_id not in wanted), None)
        assert oldest is not None, "more sequences with penalties in a step than max_rows"
        self.forget([oldest])

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the ids inside the vocabulary, [n] int64 on the device."""
        ids = np.array(token_ids, dtype=np.int64)
        return to_device(ids[(ids >= 0) & (ids < self._vocab_size)], self._device)
