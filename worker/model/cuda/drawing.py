"""draw_rows: one token for each row of logits, by the two kernels of the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.model.cuda.kernels import logits_scan as columns
from worker.model.cuda.kernels.logits_scan import logits_scan
from worker.model.cuda.kernels.sample_finalize import sample_finalize

BLOCK = 2048  # tokens of a program of `logits_scan`
GROUP = 32  # neighbouring tokens, of which the best is noted
TILE = 128  # groups that `sample_finalize` reads at once
FEW = 4096  # tokens among which it looks for the last that stays
_MOST_GROUPS = 8192


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What rows want, on the device. Columns are those of `kernels.logits_scan`."""

    ints: Tensor  # [rows, NUM_INTS] int64
    floats: Tensor  # [rows, NUM_FLOATS] float32
    edit_starts: Tensor
    edit_tokens: Tensor
    edit_values: Tensor
    num_edits: int
    num_edited: int  # rows that are written once edited; the scored ones come first
    has_edits: bool
    has_filters: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What changes from step to step, on the device."""

    ints: Tensor  # [rows, NUM_STEP_INTS] int64
    masks: Tensor  # [masks, words] int32
    output_counts: Tensor  # [slots, vocab] int32
    in_prompt: Tensor  # [slots, vocab] bool


@dataclass(frozen=True, slots=True)
class Drawn:
    token_ids: Tensor  # [rows] int64
    best_logits: Tensor  # [rows] float32
    edited: Tensor  # [num_edited, vocab] float32


def draw_rows(logits: Tensor, rows: RowPlan, step: StepPlan) -> Drawn:
    """Draws one token for each row of logits [rows, vocab], which stay as they are."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // BLOCK)
    group = GROUP
    while -(-vocab_size // group) > _MOST_GROUPS:
        group *= 2
    num_groups = -(-vocab_size // group) if rows.has_filters else 1

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    edited = empty(max(rows.num_edited, 1), vocab_size if rows.num_edited else 1)
    group_best = empty(num_rows if rows.has_filters else 1, num_groups)
    found = empty(num_rows, int(columns.NUM_FOUND), num_blocks)
    winners = empty(num_rows, num_blocks, dtype=torch.int32)
    token_ids = empty(num_rows, dtype=torch.int64)
    best_logits = empty(num_rows)
    logits_scan[(num_blocks, num_rows)](
        logits,
        logits.stride(0),
        rows.ints,
        step.ints,
        rows.floats,
        rows.edit_starts,
        rows.edit_tokens,
        rows.edit_values,
        rows.num_edits,
        step.output_counts,
        step.in_prompt.view(torch.uint8),
        step.masks,
        step.masks.stride(0),
        edited,
        group_best,
        found,
        winners,
        vocab_size,
        num_blocks,
        num_groups,
        HAS_EDITS=rows.has_edits,
        BLOCK=BLOCK,
        GROUP=group,
        num_warps=4,
        enable_fp_fusion=False,  # the specification rounds products
    )
    sample_finalize[(num_rows,)](
        logits,
        logits.stride(0),
        rows.ints,
        step.ints,
        rows.floats,
        edited,
        group_best,
        empty(len(group_best), num_groups + FEW, dtype=torch.int32),
        found,
        winners,
        token_ids,
        best_logits,
        vocab_size,
        num_blocks,
        num_groups,
        HAS_FILTERS=rows.has_filters,
        BLOCKS=triton.next_power_of_2(num_blocks),
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=group,
        TILE=TILE * GROUP // group,
        FEW=FEW,
        num_warps=16 if rows.has_filters else 2,
        enable_fp_fusion=False,
    )
    return Drawn(token_ids, best_logits, edited)


class BestTokens:
    """The most likely token of each row: what `draw_rows` draws for rows that want nothing else.

    Nothing is uploaded, so calls can be captured in a CUDA graph.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        nothing = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._ints = full(0, max_rows, int(columns.NUM_INTS))
        self._ints[:, int(columns.EDITED_PLACE)] = -1
        self._step_ints = full(-1, max_rows, int(columns.NUM_STEP_INTS))
        self._floats = torch.ones((max_rows, int(columns.NUM_FLOATS)), device=device)
        self._nothing = nothing

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids [rows] int64 and best logits [rows] float32 of logits [rows, vocab]; rows
        without a finite best logit have no distribution, as in Sampled."""
        nothing = self._nothing
        floats = nothing.view(torch.float32)
        rows = RowPlan(
            self._ints[: len(logits)],
            self._floats[: len(logits)],
            nothing,
            nothing,
            floats,
            num_edits=0,
            num_edited=0,
            has_edits=False,
            has_filters=False,
        )
        drawn = draw_rows(logits, rows, StepPlan(self._step_ints, nothing, nothing, nothing))
        return drawn.token_ids, drawn.best_logits
