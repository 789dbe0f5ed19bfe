"""Which tokens a row may still draw: min-p, then top-k, then top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """[rows, 1] what min-p leaves of the whole row."""
    alive = scores >= params.min_log_p[:, None]
    mass = torch.where(alive, scores, -torch.inf).exp()
    return mass.sum(dim=1, keepdim=True, dtype=torch.float64)


def _kept_counts(head: Tensor, params: FilterParams, whole_mass: Tensor | None) -> Tensor:
    """[rows] how many of the sorted head stay: always a prefix of it.

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
    """The `kept` best of every row, ties broken by token id."""
    last = head.gather(1, kept[:, None] - 1)
    above = scores > last
    level = scores == last
    room = kept[:, None] - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= room))
