"""What changes logits before the draw: penalties, bias and `min_tokens`, and the filters.

Filters apply in the order min-p, top-k, top-p.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow

# The head of a row in which the nucleus is looked for first, where looking costs no wait.
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class FilterParams:
    """One value per row, float32 except `top_k`, on the logits' device."""

    top_k: Tensor  # [rows] int64; vocabulary size where the row keeps all
    top_p: Tensor  # [rows]; 1 where the row keeps all
    min_log_p: Tensor  # [rows] log(min_p); -inf where the row keeps all
    max_top_k: int  # the largest of top_k, on the host


def keep_mask(scores: Tensor, params: FilterParams) -> Tensor:
    """Returns [rows, vocab], True for the tokens that stay; at least one in every row.

    `scores` are float32 logits over temperature whose largest value in each row is 0. min-p is
    relative to the likeliest token; top-p is the smallest set of the likeliest tokens whose share
    of what min-p and top-k left reaches `top_p`. Among equal scores the lower token id stays.
    """
    vocab_size = scores.shape[1]
    width = min(params.max_top_k, vocab_size)
    if width > _WINDOW and not scores.is_cuda:
        head = torch.topk(scores, _WINDOW, dim=1).values
        kept = _kept_counts(head, params, _alive_mass(scores, params))
        closed = (params.top_k == vocab_size) & (kept < _WINDOW)
        if bool((closed | (params.top_k <= _WINDOW)).all()):
            return _mask(scores, head, kept)
    if width > vocab_size // 8:
        head = torch.sort(scores, dim=1, descending=True).values[:, :width]
    else:
        head = torch.topk(scores, width, dim=1).values
    return _mask(scores, head, _kept_counts(head, params, None))


def _alive_mass(scores: Tensor, params: FilterParams) -> Tensor:
    """Returns [rows, 1]: what min-p leaves of the whole row."""
    alive = scores >= params.min_log_p[:, None]
    mass = torch.where(alive, scores, -torch.inf).exp()
    return mass.sum(dim=1, keepdim=True, dtype=torch.float64)


def _kept_counts(head: Tensor, params: FilterParams, whole_mass: Tensor | None) -> Tensor:
    """Returns [rows]: how many of the sorted head stay: always a prefix of it.

    A row whose top-k lies beyond the head measures its nucleus against `whole_mass`. Sums are
    float64, so that the result depends neither on their order nor on the width of the head, which
    other rows choose.
    """
    rank = torch.arange(head.shape[1], device=head.device)
    alive = (rank < params.top_k[:, None]) & (head >= params.min_log_p[:, None])
    mass = torch.where(alive, head, -torch.inf).exp().double()
    total = mass.sum(dim=1, keepdim=True)
    if whole_mass is not None:
        total = torch.where((params.top_k > head.shape[1])[:, None], whole_mass, total)
    before = mass.cumsum(dim=1) - mass
    nucleus = (before < params.top_p[:, None] * total) | (params.top_p >= 1)[:, None]
    return (alive & nucleus).sum(dim=1).clamp_(min=1)


def _mask(scores: Tensor, head: Tensor, kept: Tensor) -> Tensor:
    """Returns a mask [rows, vocab] of the `kept` [rows] best of each row, ties broken by token id.

    `scores` are [rows, vocab], `head` [rows, n] the best of them in descending order.
    """
    last = head.gather(1, kept[:, None] - 1)
    above = scores > last
    level = scores == last
    num_level = kept[:, None] - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= num_level))


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


_FIRST_CAPACITY = 4


class PenaltyTable:
    """Applies repetition, presence and frequency penalties, counted on the device.

    Has token counts of the sequences that have penalties, and no memory until one does.

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
