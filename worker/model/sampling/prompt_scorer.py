"""Log probabilities of prompts: of each token, given the ones before it.

A chunk's logits are [tokens, vocab]: of a long chunk and a large vocabulary some gigabytes. So they
are made for a few rows at a time, each row gives the few numbers that were requested, and the rest
is dropped. They are the model's own: no bias, penalty or grammar is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.messages import ErrorCode, PromptLogprob
from worker.engine.batch import ScheduledSequence
from worker.model.device import to_device, to_host
from worker.model.sampling.row import RowThreads
from worker.model.served import ServedModel

MAX_LOGITS = 1 << 23  # made at once: 32 MiB of float32, and as much again for what compares them
DECIMALS = 1e6  # six: far finer than what another order of summing up changes

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a step's hidden states that score prompt tokens, sequence by sequence."""

    places: Tensor  # [n] int64, among the step's rows
    token_ids: Tensor  # [n] int64, the tokens that are scored
    sequences: tuple[ScheduledSequence, ...]  # with `scores`; together they have n of them


def rows_with_scores(
    sequences: Sequence[ScheduledSequence], ends: Int32Array, device: torch.device
) -> tuple[Int32Array, Tensor, ScoredRows]:
    """Returns the rows of a batch that are sampled or score a token, the sampled, and the scored.

    The rows are ascending, [n] int32; the sampled are [m] indices among them.
    """
    rows: list[int] = []
    sampled: list[int] = []
    places: list[int] = []
    token_ids: list[int] = []
    for begin, sequence in zip(ends.tolist(), sequences, strict=False):
        scores, first = sequence.scores, begin - sequence.start - 1
        places += range(len(rows), len(rows) + len(scores))
        rows += range(first + scores.start, first + scores.stop) if scores else ()
        token_ids += sequence.prompt_token_ids[scores.start : scores.stop]
        if sequence.samples:
            sampled.append(len(rows))
            rows.append(begin + sequence.num_scheduled_tokens - 1)
    there = to_device(np.array([places, token_ids], dtype=np.int64), device)
    scored = ScoredRows(there[0], there[1], tuple(s for s in sequences if s.scores))
    return (
        np.array(rows, dtype=np.int32),
        to_device(np.array(sampled, dtype=np.int64), device),
        scored,
    )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log probability and rank of each scored token, and the best ones'."""

    sequences: tuple[ScheduledSequence, ...]
    chosen: Tensor  # [n] float64
    ranks: Tensor  # [n] int64, from 1
    top_ids: Tensor  # [n, k] int64
    top: Tensor  # [n, k] float64

    def to_host(self) -> PromptScores:
        return PromptScores(
            self.sequences,
            to_host(self.chosen),
            to_host(self.ranks),
            to_host(self.top_ids),
            to_host(self.top),
        )

    def by_sequence(self) -> tuple[dict[int, tuple[PromptLogprob, ...]], Mapping[int, str]]:
        """Returns the scores by sequence id, and why others have none: a model gave NaN, or nothing
        to compare with. For the host's copy."""
        scores, failed, begin = {}, {}, 0
        is_number = torch.isfinite(self.chosen) | torch.isneginf(self.chosen)
        for sequence in self.sequences:
            part = slice(begin, begin + len(sequence.scores))
            begin = part.stop
            if not bool(is_number[part].all()):
                failed[sequence.seq_id] = ErrorCode.NONFINITE_LOGITS.value
                continue
            num_top = sequence.params.prompt_logprobs or 0
            scores[sequence.seq_id] = tuple(
                PromptLogprob(token_id, logprob, rank, tuple(zip(top_ids, top, strict=True)))
                for token_id, logprob, rank, top_ids, top in zip(
                    sequence.prompt_token_ids[sequence.scores.start : sequence.scores.stop],
                    self.chosen[part].tolist(),
                    self.ranks[part].tolist(),
                    self.top_ids[part, :num_top].tolist(),
                    self.top[part, :num_top].tolist(),
                    strict=True,
                )
            )
        return scores, failed


def score_prompts(
    model: ServedModel, hidden: Tensor, scored: ScoredRows, threads: RowThreads
) -> PromptScores:
    """Scores tokens by final hidden states [rows, hidden]. Never waits for a CUDA device.

    The logits of at most MAX_LOGITS numbers, and of one row at least, are held at any time.
    """
    requested = max(sequence.params.prompt_logprobs or 0 for sequence in scored.sequences)
    num_top = min(requested, model.config.vocab_size)
    compare = functools.partial(_numbers, num_top=num_top)
    numbers = torch.cat(
        [
            threads.map(compare, logits, scored.token_ids[part])
            for part, logits in logits_by_part(model, hidden, scored)
        ]
    )
    return PromptScores(
        scored.sequences,
        chosen=numbers[:, 0],
        ranks=numbers[:, 1].long(),
        top_ids=numbers[:, 2 : 2 + num_top].long(),
        top=numbers[:, 2 + num_top :],
    )


def logits_by_part(
    model: ServedModel, hidden: Tensor, scored: ScoredRows
) -> Iterator[tuple[slice, Tensor]]:
    """Yields which of the scored rows come next, and their logits [n, vocab], valid until then.

    `hidden` are final hidden states [rows, hidden] of the step.
    """
    step = max(1, MAX_LOGITS // model.config.vocab_size)
    for begin in range(0, len(scored.places), step):
        part = slice(begin, begin + step)
        yield part, model.logits(hidden.index_select(0, scored.places[part]))


def _numbers(logits: Tensor, token_ids: Tensor, *, num_top: int) -> Tensor:
    """Returns [n, 2 + 2 * num_top] float64, which holds ranks and token ids exactly: a token's log
    probability and rank, the best tokens' ids and log probabilities."""
    logits = logits.float()
    picked = logits.gather(1, token_ids[:, None])
    norm = logits.logsumexp(dim=1, keepdim=True)
    best, best_ids = logits.topk(num_top, dim=1)
    ranks = (logits > picked).sum(dim=1, keepdim=True) + 1
    return torch.cat(
        (_rounded(picked - norm), ranks.double(), best_ids.double(), _rounded(best - norm)), dim=1
    )


def _rounded(logprobs: Tensor) -> Tensor:
    """Returns the same shape as float64 with few digits: thousands of them are sent as text."""
    return (logprobs.double() * DECIMALS).round() / DECIMALS + 0.0
