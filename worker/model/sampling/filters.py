"""Filters: which tokens may be drawn. They apply in the order min-p, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
    if width > vocab_size // 8:
        head = torch.sort(scores, dim=1, descending=True).values[:, :width]
    else:
        head = torch.topk(scores, width, dim=1).values
    return _mask(scores, head, _kept_counts(head, params))


def _kept_counts(head: Tensor, params: FilterParams) -> Tensor:
    """Returns [rows]: how many of the sorted head stay: always a prefix of it.

    Sums are float64, so that the result depends neither on their order nor on the width of the
    head, which other rows choose.
    """
    rank = torch.arange(head.shape[1], device=head.device)
    alive = (rank < params.top_k[:, None]) & (head >= params.min_log_p[:, None])
    mass = torch.where(alive, head, -torch.inf).exp().double()
    total = mass.sum(dim=1, keepdim=True)
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


# How far below the best a row's tokens are sorted, until what stays is among them.
_REACHES = (4.0, 8.0, 16.0, 32.0, np.inf)


def kept_on_host(
    scores: NDArray[np.float32], top_k: int, top_p: float, min_log_p: float
) -> NDArray[np.int64]:
    """Returns the tokens of one row that `keep_mask` would keep, in ascending order.

    `scores` [vocab] are as there: the largest is 0. Few passes over them: only those near the best
    are sorted.
    """
    total = None
    if top_p < 1 and top_k >= len(scores) and min_log_p == -np.inf:
        total = float(np.exp(scores).sum(dtype=np.float64))
    for reach in _REACHES:
        floor = max(-reach, min_log_p)
        near = np.flatnonzero(scores >= floor)
        has_all = floor == min_log_p or reach == np.inf
        if not has_all and len(near) < top_k and (total is None or len(near) == 0):
            continue
        kept = _kept_near(scores[near], near, top_k, top_p, total)
        if kept is not None or has_all:
            break
    assert kept is not None, "the last reach has all tokens"
    return kept


def _kept_near(
    scores: NDArray[np.float32],
    token_ids: NDArray[np.int64],
    top_k: int,
    top_p: float,
    total: float | None,
) -> NDArray[np.int64] | None:
    """Returns those that stay; None: `total`, the mass of the row, shows that some are not among
    these `token_ids`, which are ascending."""
    if len(scores) > top_k:
        order = np.argsort(-scores, kind="stable")[:top_k]
    elif top_p >= 1:
        return token_ids
    else:
        order = np.argsort(-scores, kind="stable")
    if top_p < 1:
        mass = np.exp(scores[order]).astype(np.float64)
        after = mass.cumsum()
        wanted = top_p * (after[-1] if total is None else total)
        if total is not None and after[-1] < wanted:
            return None
        order = order[: max(1, int(np.count_nonzero(after - mass < wanted)))]
    return np.sort(token_ids[order])
