"""keep_mask against the definition, over random rows and parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import SamplingParams
from tests.support.examples import examples
from tests.support.sampling_exact import exact_distribution
from worker.model.sampling.filters import FilterParams, keep_mask, kept_on_host

ROW = st.tuples(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 3, 7, 50, 10**6]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0.1, 1.0, 5.0]),  # spread of the scores
    st.booleans(),  # scores on a coarse grid, so that many are equal
)


def scores_of(seed: int, vocab: int, spread: float, coarse: bool) -> torch.Tensor:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if coarse:
        scores = (scores * 2).round() / 2
    return scores - scores.max()


def params_of(rows: list[tuple[int, int, float, float, float, bool]], vocab: int) -> FilterParams:
    top_k = [min(r[1] or vocab, vocab) for r in rows]
    return FilterParams(
        top_k=torch.tensor(top_k),
        top_p=torch.tensor([r[2] for r in rows]),
        min_log_p=torch.tensor([math.log(r[3]) if r[3] else -math.inf for r in rows]),
        max_top_k=max(top_k),
    )


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=4), vocab=st.sampled_from([1, 2, 30, 300]))
def test_what_stays_is_a_definite_head_of_the_row(
    rows: list[tuple[int, int, float, float, float, bool]], vocab: int
) -> None:
    scores = torch.stack([scores_of(r[0], vocab, r[4], r[5]) for r in rows])
    kept = keep_mask(scores, params_of(rows, vocab))
    for line, row, mask in zip(scores.numpy(), rows, kept.numpy(), strict=True):
        order = sorted(range(vocab), key=lambda i: (-line[i], i))
        count = int(mask.sum())
        assert count >= 1
        assert mask[order[:count]].all(), "a prefix of (score, then token id)"
        exact = SamplingParams(top_k=row[1], top_p=row[2], min_p=row[3])
        expected = int(np.count_nonzero(exact_distribution(line, exact)))
        # Where a threshold falls on a sum within rounding, one token more or less is right too.
        assert abs(count - expected) <= 1


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(row=ROW, vocab=st.sampled_from([1, 2, 30, 300, 3000]))
def test_the_host_keeps_what_a_device_keeps(
    row: tuple[int, int, float, float, float, bool], vocab: int
) -> None:
    scores = scores_of(row[0], vocab, row[4], row[5])
    params = params_of([row], vocab)
    mask = keep_mask(scores[None], params)[0]
    kept = kept_on_host(
        scores.numpy(), int(params.top_k), float(params.top_p), float(params.min_log_p)
    )
    expected = np.flatnonzero(mask.numpy())
    if len(kept) != len(expected):
        # A threshold on a sum within rounding: the last token is right, and so is its absence.
        assert abs(len(kept) - len(expected)) == 1
        assert row[2] < 1
    few, many = sorted((kept.tolist(), expected.tolist()), key=len)
    assert set(few) <= set(many)
    assert kept.tolist() == sorted(kept)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=2, max_size=4))
def test_a_row_keeps_the_same_alone_and_among_others(
    rows: list[tuple[int, int, float, float, float, bool]],
) -> None:
    scores = torch.stack([scores_of(r[0], 300, r[4], r[5]) for r in rows])
    together = keep_mask(scores, params_of(rows, 300))
    for i, row in enumerate(rows):
        assert torch.equal(keep_mask(scores[i : i + 1], params_of([row], 300))[0], together[i])


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(row=ROW)
def test_looser_parameters_keep_at_least_as_much(
    row: tuple[int, int, float, float, float, bool],
) -> None:
    scores = scores_of(row[0], 100, row[4], row[5])[None]
    sizes = [
        int(keep_mask(scores, params_of([(row[0], row[1], top_p, *row[3:])], 100)).sum())
        for top_p in (0.0, 0.2, 0.5, 0.9, 1.0)
    ]
    assert all(a <= b for a, b in pairwise(sizes))
    params = params_of([row], 100)
    off = replace(params, top_p=torch.ones(1), top_k=torch.tensor([100]), max_top_k=100)
    assert keep_mask(scores, replace(off, min_log_p=torch.tensor([-math.inf]))).all()
