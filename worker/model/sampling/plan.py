"""BatchPlan: the sampling parameters of a batch's rows, kept while the batch stays the same."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.messages import SamplingParams
from worker.model.sampling.noise import row_keys, seed_keys
from worker.model.sampling.row import SamplingRow

# Temperatures below this are greedy to float32 anyway; dividing by them would overflow.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Draws:
    """By what each of some rows is drawn: arrays [rows] on the host."""

    temperature: NDArray[np.float32]
    seed_key: NDArray[np.uint64]
    top_k: NDArray[np.int64]  # vocabulary size where the row keeps all
    top_p: NDArray[np.float32]  # 1 where the row keeps all
    min_log_p: NDArray[np.float32]  # log(min_p); -inf where the row keeps all
    is_filtered: NDArray[np.bool_]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Draws:
        top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64)
        top_p = np.array([p.top_p for p in params], dtype=np.float32)
        min_log_p = np.array(
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], dtype=np.float32
        )
        is_filtered = [p.min_p > 0 or p.top_p < 1 or 0 < p.top_k < vocab_size for p in params]
        return cls(
            np.array([max(p.temperature, _MIN_TEMPERATURE) for p in params], dtype=np.float32),
            seed_keys([p.seed or 0 for p in params]),
            top_k,
            top_p,
            min_log_p,
            np.array(is_filtered, dtype=np.bool_),
        )

    def keys(self, rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
        """Returns the keys of the rows' noise, [rows]."""
        positions = np.array([row.position for row in rows], dtype=np.int64)
        return row_keys(self.seed_key, positions)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Places of rows in the batch, by what they want; a row may be in several."""

    params: tuple[SamplingParams, ...]
    biased: tuple[int, ...]
    penalised: tuple[int, ...]
    with_minimum: tuple[int, ...]  # of output tokens; those with a grammar are left out
    structured: tuple[int, ...]
    greedy: tuple[int, ...]
    drawn: tuple[int, ...]
    scored: tuple[int, ...]  # their log probabilities are wanted
    draws: Draws  # of the drawn ones
    is_plain_greedy: bool  # the best tokens are wanted, and nothing else

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int) -> BatchPlan:
        params = tuple(row.params for row in rows)
        each = list(enumerate(params))
        biased = tuple(i for i, p in each if p.logit_bias)
        penalised = tuple(i for i, row in enumerate(rows) if row.has_penalties)
        with_minimum = tuple(i for i, p in each if p.min_tokens and p.grammar is None)
        structured = tuple(i for i, p in each if p.grammar is not None)
        drawn = tuple(i for i, p in each if not p.greedy)
        scored = tuple(i for i, p in each if p.logprobs is not None)
        return cls(
            params,
            biased=biased,
            penalised=penalised,
            with_minimum=with_minimum,
            structured=structured,
            greedy=tuple(i for i, p in each if p.greedy),
            drawn=drawn,
            scored=scored,
            draws=Draws.of([params[i] for i in drawn], vocab_size),
            is_plain_greedy=not (
                biased or penalised or with_minimum or structured or drawn or scored
            ),
        )

    def is_of(self, rows: Sequence[SamplingRow]) -> bool:
        """Returns whether it holds for these rows: the same parameters, in the same order."""
        return len(rows) == len(self.params) and all(
            map(operator.is_, self.params, [row.params for row in rows])
        )
