"""SamplingKernels: samples a batch in two launches, whatever parameters its rows have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import SamplingParams
from worker.model.cuda.drawing import BLOCK, RowPlan, StepPlan, draw_rows
from worker.model.cuda.kernels import logits_scan as columns
from worker.model.device import to_device
from worker.model.sampling.base import Chosen
from worker.model.sampling.logits import PenaltyTable, amounts_of
from worker.model.sampling.plan import BatchPlan
from worker.model.sampling.row import SamplingRow

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks


class SamplingKernels:
    """Draws as `worker.model.sampling.sampler`, its specification, from logits on a CUDA device.

    Logits stay as they are. Sums of probabilities are in another order than the specification's:
    of tokens whose mass before them differs by less than 1e-6 from the wanted share, another one
    may be the last of a nucleus. Instances are for one thread and one stream.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        penalties: PenaltyTable,
        grammar_masks: GrammarMasks | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._penalties = penalties
        self._grammar_masks = grammar_masks
        self._edits = _SparseEdits(vocab_size, eos_token_ids)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        # By whether there are structured rows: for as long as the batch stays the same.
        self._plans: dict[bool, tuple[BatchPlan, RowPlan]] = {}

    def draw(
        self, logits: Tensor, rows: Sequence[SamplingRow], plan: BatchPlan, previous: Tensor
    ) -> Chosen:
        """Draws one token for each row of logits [rows, vocab], float32, bfloat16 or float16.

        `plan` is of these rows, `previous` [n] int64 the step before's sample. Waits for nothing.
        """
        is_structured = bool(plan.structured)
        known, there = self._plans.get(is_structured, (None, None))
        if there is None or known is not plan:
            there = self._upload(plan, rows)
            self._plans[is_structured] = plan, there
        step_ints = np.full((len(rows), int(columns.NUM_STEP_INTS)), -1, dtype=np.int64)
        step_ints[:, columns.POSITION] = [row.position for row in rows]
        for i in plan.with_minimum:
            holds_back = rows[i].num_outputs < rows[i].params.min_tokens
            step_ints[i, columns.HOLDS_BACK] = holds_back
        if plan.penalised:
            slots = self._penalties.count([rows[i] for i in plan.penalised], previous)
            step_ints[list(plan.penalised), columns.SLOT] = slots
        masks, failed = self._nothing[:, None], dict[int, str]()
        if plan.structured:
            assert self._grammar_masks is not None, "jobs with a grammar are refused without masks"
            structured = {i: rows[i] for i in plan.structured}
            masked, on_host, failed = self._grammar_masks.masks_of(structured)
            if masked:
                step_ints[masked, columns.MASK] = range(len(masked))
                masks = to_device(on_host, self._device)
        step = StepPlan(
            to_device(step_ints, self._device),
            masks,
            self._penalties.output_counts,
            self._penalties.in_prompt,
        )
        drawn = draw_rows(logits, there, step)
        scored = drawn.edited[: len(plan.scored)] if plan.scored else None
        return Chosen(drawn.token_ids, drawn.best_logits, scored, failed)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        self._edits.forget(seq_ids)

    def _upload(self, plan: BatchPlan, rows: Sequence[SamplingRow]) -> RowPlan:
        ints = np.zeros((len(rows), int(columns.NUM_INTS)), dtype=np.int64)
        floats = np.ones((len(rows), int(columns.NUM_FLOATS)), dtype=np.float32)
        drawn, draws = list(plan.drawn), plan.draws
        ints[drawn, columns.SEED_KEY] = draws.seed_key.view(np.int64)
        ints[drawn, columns.FLAGS] = int(columns.DRAWN) + int(
            columns.FILTERED
        ) * draws.is_filtered.astype(np.int64)
        ints[drawn, columns.TOP_K] = draws.top_k
        ints[list(plan.structured), columns.FLAGS] |= int(columns.STRUCTURED)
        floats[drawn, columns.TEMPERATURE] = draws.temperature
        floats[drawn, columns.TOP_P] = draws.top_p
        floats[drawn, columns.REACH] = np.float32(0) - draws.min_log_p  # never -0
        if plan.penalised:
            first, end = int(columns.REPETITION), int(columns.FREQUENCY) + 1
            amounts = [amounts_of(plan.params[i]) for i in plan.penalised]
            floats[list(plan.penalised), first:end] = amounts
        edited = {*plan.biased, *plan.penalised, *plan.with_minimum, *plan.structured}
        filtered = np.array(plan.drawn, dtype=np.int64)[draws.is_filtered].tolist()
        written = [*plan.scored, *sorted(edited.intersection(filtered).difference(plan.scored))]
        ints[:, columns.EDITED_PLACE] = -1
        ints[written, columns.EDITED_PLACE] = range(len(written))
        starts, tokens, values = self._edits.of(
            {i: rows[i] for i in sorted({*plan.biased, *plan.with_minimum})}, len(rows)
        )
        return RowPlan(
            to_device(ints, self._device),
            to_device(floats, self._device),
            to_device(starts, self._device) if len(tokens) else self._nothing,
            to_device(tokens, self._device) if len(tokens) else self._nothing,
            to_device(values, self._device) if len(tokens) else self._nothing.view(torch.float32),
            num_edits=len(tokens),
            num_edited=len(written),
            has_edits=bool(edited or written),
            has_filters=bool(filtered),
        )


class _SparseEdits:
    """Biases and stop tokens of rows, by the blocks of `logits_scan`.

    Keeps each sequence's until it is forgotten.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_blocks = -(-vocab_size // BLOCK)
        self._kept: dict[int, tuple[SamplingParams, NDArray[np.int32], NDArray[np.float32]]] = {}

    def of(
        self, rows: Mapping[int, SamplingRow], num_rows: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Returns where each block of each of `num_rows` begins, the tokens and their values.

        A stop token is ~token.
        """
        each = [self._edits(row) for row in rows.values()]
        counts = [len(tokens) for tokens, _ in each]
        tokens = np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in each)])
        values = np.concatenate([np.empty(0, np.float32), *(values for _, values in each)])
        row = np.repeat(np.array(list(rows), dtype=np.int64), counts)
        block = row * self._num_blocks + np.where(tokens < 0, ~tokens, tokens) // BLOCK
        order = np.argsort(block, kind="stable")
        ends = np.bincount(block, minlength=num_rows * self._num_blocks).cumsum()
        return np.concatenate([[0], ends]).astype(np.int32), tokens[order], values[order]

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._kept.pop(seq_id, None)

    def _edits(self, row: SamplingRow) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        kept = self._kept.get(row.seq_id)
        if kept is not None and kept[0] is row.params:
            return kept[1], kept[2]
        params = row.params
        bias = params.logit_bias or {}
        stops: set[int] = set()
        if params.min_tokens and params.grammar is None:
            stops.update(params.stop_token_ids)
            if not params.ignore_eos:
                stops |= self._eos_token_ids
        inside = sorted(token_id for token_id in stops if 0 <= token_id < self._vocab_size)
        tokens = np.array([*bias, *(~token_id for token_id in inside)], dtype=np.int32)
        values = np.array([*bias.values(), *(0.0 for _ in inside)], dtype=np.float32)
        self._kept[row.seq_id] = (params, tokens, values)
        return tokens, values
