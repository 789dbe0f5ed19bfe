"""Types of sampling, its kernels and a step: DrawKernels, Chosen, PreviousSample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.engine.batch import DecodeStep
from worker.model.sampling.plan import BatchPlan
from worker.model.sampling.row import SamplingRow


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens sampled from logits [rows, vocab]."""

    token_ids: Tensor  # [rows] int64
    best_logits: Tensor  # [rows] float32, as Sampled's
    scored: Tensor | None  # [scored rows of the plan, vocab] float32: their edited logits
    failed: Mapping[int, str]  # as Sampled's


class DrawKernels(Protocol):
    """Draws what the operators of `Sampler.draw` draw, which are its specification."""

    def draw(
        self, logits: Tensor, rows: Sequence[SamplingRow], plan: BatchPlan, previous: Tensor
    ) -> Chosen:
        """Draws one token for each row of logits [rows, vocab] of any float type, which stay.

        `plan` is of these rows, `previous` [n] int64 the step before's sample. Waits for nothing.
        """
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class PreviousSample:
    """What the step before sampled, still on the device: `token_ids[index_of[seq_id]]`."""

    token_ids: Tensor  # [rows] int64
    index_of: Mapping[int, int]
    decodes: DecodeStep | None = None  # of that step; they come first, in the run's order
