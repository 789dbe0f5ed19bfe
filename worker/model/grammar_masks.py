"""GrammarMasks: which tokens may come next in the rows whose output has to match a grammar."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import ErrorCode
from shared.text.errors import GrammarInvalid
from shared.text.grammar_compiler import GrammarCompiler, matcher_error
from worker.engine.batch import ScheduledSequence
from worker.model.sampling_row import SamplingRow
from worker.model.transfer import to_device

MAX_THREADS = 8

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _State:
    """A sequence's matcher and how far it has come."""

    matcher: LLMatcher
    num_consumed: int = 0  # output tokens


class GrammarMasks:
    """Keeps a matcher for each structured sequence until it is forgotten.

    A matcher is a function of the grammar and the output tokens: one that is not there is made from
    them, so preemption, another engine and another worker change nothing. Rows must have no token
    in flight: the scheduler sees to it.
    """

    def __init__(
        self, compiler: GrammarCompiler, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        """Raises GrammarInvalid when nothing can be matched over this vocabulary."""
        compiler.build()
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._vocab_size = compiler.vocab_size
        self._num_words = -(-compiler.vocab_size // 32)
        self._addends = _addends(device)
        self._states: dict[int, _State] = {}
        self._executor: LLExecutor | None = None

    def expect(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Begins to compile what these will need, while the device computes their logits."""
        for sequence in sequences:
            grammar = sequence.params.grammar
            if grammar is not None and sequence.seq_id not in self._states:
                self._compiler.compiled(grammar)

    def apply(self, logits: Tensor, rows: Mapping[int, SamplingRow]) -> dict[int, str]:
        """Makes the other tokens impossible in these rows of logits [n, vocab] (float32), in place.

        At least one token stays possible in each. The rows that are returned could not be followed
        and are as they were; the text says why, for the client, behind an ErrorCode.
        """
        failed: dict[int, str] = {}
        matchers: dict[int, LLMatcher] = {}
        for i, row in rows.items():
            try:
                matchers[i] = self._advanced(row)
            except GrammarInvalid as error:
                failed[i] = str(error)
        masks = self._filled(list(matchers.values()))
        for i, matcher in matchers.items():
            if matcher.is_error():  # too much work for one step, or no token that fits
                failed[i] = matcher_error(matcher)
        kept = [n for n, i in enumerate(matchers) if i not in failed]
        indices = [i for i in matchers if i not in failed]
        masks = masks[kept]
        for mask, i in zip(masks, indices, strict=True):
            self._hold_back_ends(mask, rows[i])
        self._forbid(logits, indices, masks)
        for i, why in failed.items():
            log.warning("a grammar could not be followed", extra={"seq_id": rows[i].seq_id})
            failed[i] = f"{ErrorCode.GRAMMAR_FAILED.value}: {why}"
        return failed

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees what was kept for these sequences; unknown ones are fine."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def _advanced(self, row: SamplingRow) -> LLMatcher:
        """The row's matcher, with all its output tokens consumed. Raises GrammarInvalid."""
        assert row.in_flight is None, "a structured row's tokens are all known"
        state = self._states.get(row.seq_id)
        if state is None:
            assert row.params.grammar is not None, "of structured rows only"
            state = self._states[row.seq_id] = _State(self._compiler.matcher(row.params.grammar))
        new = row.output_token_ids[state.num_consumed :]
        if new and not state.matcher.consume_tokens(list(new)):
            raise GrammarInvalid(
                f"the output so far does not follow the grammar: {matcher_error(state.matcher)}"
            )
        state.num_consumed += len(new)
        return state.matcher

    def _filled(self, matchers: Sequence[LLMatcher]) -> NDArray[np.int32]:
        """[matchers, ceil(vocab / 32)], one bit for each token that may come."""
        masks = np.zeros((len(matchers), self._num_words), dtype=np.int32)
        num_bytes = self._num_words * masks.itemsize
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, num_bytes)
        elif matchers:
            if self._executor is None:
                self._executor = LLExecutor(min(MAX_THREADS, torch.get_num_threads()))
            numbered = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(
                numbered, masks.ctypes.data, num_bytes, len(matchers)
            )
        return masks

    def _hold_back_ends(self, mask: NDArray[np.int32], row: SamplingRow) -> None:
        """What `min_tokens` and `ignore_eos` ask, as far as the grammar leaves a choice."""
        params = row.params
        ends: set[int] = set(self._eos_token_ids) if params.ignore_eos else set()
        if row.num_outputs < params.min_tokens:
            ends |= self._eos_token_ids | set(params.stop_token_ids)
        if not ends:
            return
        others = mask.copy()
        words = others.view(np.uint32)
        for token_id in ends:
            if token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if others.any():
            mask[:] = others

    def _forbid(self, logits: Tensor, indices: Sequence[int], masks: NDArray[np.int32]) -> None:
        if not indices:
            return
        there = to_device(masks.view(np.uint8), self._device)
        addends = self._addends.index_select(0, there.flatten().int())
        added = addends.view(len(indices), -1)[:, : self._vocab_size]
        if len(indices) == logits.shape[0]:
            logits.add_(added)
        else:
            index = to_device(np.array(indices, dtype=np.int64), self._device)
            logits.index_add_(0, index, added)


def _addends(device: torch.device) -> Tensor:
    """[256, 8] what the bits of a byte, the lowest first, add to the logits of eight tokens."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(np.where(bits == 1, 0.0, -np.inf).astype(np.float32), device)
