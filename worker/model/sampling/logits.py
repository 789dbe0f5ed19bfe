"""Edits logits before sampling: penalties, bias and `min_tokens`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import SamplingParams
from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow


class LogitEdits:
    """Applies logit bias and `min_tokens`: changes of a few logits of one row.

    Keeps each sequence's ids and values on the device until it is forgotten.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._stops: dict[int, Tensor] = {}

    def add_bias(self, logits: Tensor, row: SamplingRow) -> None:
        """Adds to `logits` [vocab] float32 in place. All ids are inside the vocabulary."""
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
        """Sets stop tokens in `logits` [vocab] to -inf until `min_tokens` are sampled."""
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


_FIRST_CAPACITY = 4  # rows of the table
_MORE_TOKENS = 64  # that fit before arrays grow


class PenaltyTable:
    """Applies repetition, presence and frequency penalties, counted on the device.

    `output_counts` [slots, vocab] int32 and `in_prompt` [slots, vocab] bool are the counts.

    Has token counts of the sequences that have penalties, and no memory until one does.

    At most `max_rows` sequences at once. A sequence that was pushed out by others is counted again
    from its tokens when it comes back, so the bound costs time, never correctness.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
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
        slots = self.count(rows, sampled)
        index = to_device(np.array([indices, slots], dtype=np.int64), self._device)
        amounts = to_device(
            np.array([amounts_of(row.params) for row in rows], dtype=np.float32), self._device
        )
        repetition, presence, frequency = amounts.unsqueeze(-1).unbind(1)
        counts = self.output_counts.index_select(0, index[1])
        is_output = counts > 0
        is_seen = is_output | self.in_prompt.index_select(0, index[1])
        part = logits.index_select(0, index[0])
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(is_seen, repeated, part)
        part -= frequency * counts
        part -= presence * is_output
        logits.index_copy_(0, index[0], part)

    def count(self, rows: Sequence[SamplingRow], sampled: Tensor) -> list[int]:
        """Counts the rows' tokens so far; returns each row's place in the arrays.

        `sampled` is as in `apply`. The arrays may be others afterwards.
        """
        wanted = {row.seq_id for row in rows}
        slots = [self._slot(row, wanted) for row in rows]
        self._count(rows, slots, sampled)
        return slots

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            slot = self._row_of.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
                del self._num_counted[seq_id]

    def forget_all(self) -> None:
        """Has all sequences counted anew: a step that raised may have counted in part."""
        self.forget(list(self._row_of))

    def _slot(self, row: SamplingRow, wanted: set[int]) -> int:
        """Returns the sequence's row in the table, made from its prompt where it has none."""
        if self._num_counted.get(row.seq_id, 0) > row.num_outputs:
            self.forget([row.seq_id])  # of a step that was given up the last token was counted
        slot = self._row_of.get(row.seq_id)
        if slot is not None:
            self._row_of.move_to_end(row.seq_id)
            return slot
        if not self._free:
            self._free_slot(wanted)
        slot = self._free.pop()
        self._row_of[row.seq_id] = slot
        self._num_counted[row.seq_id] = 0
        self.output_counts[slot].zero_()
        self.in_prompt[slot].zero_()
        self.in_prompt[slot].index_fill_(0, self._ids(row.prompt_token_ids), True)
        return slot

    def _count(self, rows: Sequence[SamplingRow], slots: Sequence[int], sampled: Tensor) -> None:
        """Counts the rows' new outputs; `sampled` [rows] int64 are the step before's tokens."""
        places: list[int] = []
        in_flight: list[tuple[int, int]] = []  # the beginning of the counts, the place in `sampled`
        for row, slot in zip(rows, slots, strict=True):
            counted, begin = self._num_counted[row.seq_id], slot * self._vocab_size
            if counted < len(row.output_token_ids):
                new = row.output_token_ids[counted:]
                places += [begin + token for token in new if 0 <= token < self._vocab_size]
                counted = len(row.output_token_ids)
            if row.in_flight is not None and counted < row.num_outputs:
                in_flight.append((begin, row.in_flight))
                counted += 1
            self._num_counted[row.seq_id] = counted
        counts = self.output_counts.view(-1)
        if places:
            _count_up(counts, to_device(np.array(places, dtype=np.int64), self._device))
        if in_flight:
            begins, where = to_device(np.array(in_flight, dtype=np.int64), self._device).unbind(1)
            _count_up(counts, begins + sampled.index_select(0, where))

    def _free_slot(self, wanted: set[int]) -> None:
        capacity = self.output_counts.shape[0]
        if capacity < self._max_rows:
            grown = min(max(2 * capacity, _FIRST_CAPACITY), self._max_rows)
            padding = (0, 0, 0, grown - capacity)
            output_counts = torch.nn.functional.pad(self.output_counts, padding)
            in_prompt = torch.nn.functional.pad(self.in_prompt, padding)
            self.output_counts, self.in_prompt = output_counts, in_prompt  # both or none
            self._free.extend(range(capacity, grown))
            return
        oldest = next((seq_id for seq_id in self._row_of if seq_id not in wanted), None)
        assert oldest is not None, "more sequences with penalties in a step than max_rows"
        self.forget([oldest])

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the ids inside the vocabulary, [n] int64 on the device."""
        ids = np.array(token_ids, dtype=np.int64)
        return to_device(ids[(ids >= 0) & (ids < self._vocab_size)], self._device)


def _count_up(counts: Tensor, places: Tensor) -> None:
    """Adds one to `counts` [n] int32 at each of the places, as often as it is named."""
    counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


def amounts_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


class HostPenalties:
    """Applies the same penalties where logits are on the host: to the tokens that occur, alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen: dict[int, _Seen] = {}  # by seq_id

    def apply(
        self, logits: Tensor, indices: Sequence[int], rows: Sequence[SamplingRow], sampled: Tensor
    ) -> None:
        """Does what PenaltyTable.apply does."""
        for i, row in zip(indices, rows, strict=True):
            seen = self._seen.get(row.seq_id)
            if seen is None or seen.num_counted > row.num_outputs:  # of a step that was given up
                seen = self._seen[row.seq_id] = _Seen(row.prompt_token_ids, self._vocab_size)
            seen.count(row.output_token_ids[seen.num_counted :])
            if row.in_flight is not None and seen.num_counted < row.num_outputs:
                seen.count([int(sampled[row.in_flight])])
            seen.penalise(logits[i].numpy(), *map(np.float32, amounts_of(row.params)))

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._seen.pop(seq_id, None)

    def forget_all(self) -> None:
        """Does what PenaltyTable.forget_all does."""
        self._seen.clear()


class _Seen:
    """The tokens that occur in one sequence, each once, and how often among its outputs."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self.num_counted = 0  # output tokens
        self._vocab_size = vocab_size
        found = np.unique(np.array(prompt, dtype=np.int64))
        found = found[(found >= 0) & (found < vocab_size)]
        self._num_tokens = len(found)
        self._token_ids = np.concatenate((found, np.zeros(_MORE_TOKENS, dtype=np.int64)))
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(found.tolist())}

    def count(self, token_ids: Sequence[int]) -> None:
        """Counts output tokens."""
        for token in token_ids:
            self.num_counted += 1
            if not 0 <= token < self._vocab_size:
                continue
            place = self._place.setdefault(token, self._num_tokens)
            if place == self._num_tokens:
                self._append(token)
            self._counts[place] += 1

    def penalise(
        self,
        logits: NDArray[np.float32],
        repetition: np.float32,
        presence: np.float32,
        frequency: np.float32,
    ) -> None:
        """Changes logits [vocab] in place."""
        token_ids = self._token_ids[: self._num_tokens]
        counts = self._counts[: self._num_tokens]
        part = logits[token_ids]
        part = np.where(part > 0, part / repetition, part * repetition)
        part -= frequency * counts
        part -= presence * (counts > 0)
        logits[token_ids] = part

    def _append(self, token: int) -> None:
        if self._num_tokens == len(self._token_ids):
            more = max(_MORE_TOKENS, self._num_tokens // 2)
            self._token_ids = np.concatenate((self._token_ids, np.zeros(more, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(more, dtype=np.float32)))
        self._token_ids[self._num_tokens] = token
        self._num_tokens += 1
