"""Which tokens a row may still draw: min-p, then top-k, then top-p."""

from __future__ import annotations

from collections.abc import Iterable
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
    """[rows, vocab] True for the tokens that stay; at least one in every row.

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
