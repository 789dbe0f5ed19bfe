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

from shared.cores import available_cores
from shared.messages import ErrorCode
from shared.text.base import GrammarInvalid
from shared.text.grammar_compiler import GrammarCompiler, matcher_error
from worker.engine.batch import DecodingSequence
from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow

MAX_THREADS = 8

# [256, 8] what the logits of eight tokens may be at most, by the bits of a byte, the lowest first.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CAPS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _State:
    """A sequence's matcher and how far it has come."""

    matcher: LLMatcher
    num_consumed: int = 0  # output tokens


class GrammarMasks:
    """Keeps a matcher for each structured sequence until it is forgotten.

    A matcher is a function of the grammar and the output tokens: one that is not there is made from
    them, so preemption, another engine and another worker change nothing. All output tokens of a
    row must be known: see StepHandle.sample_structured.
    """

    def __init__(
        self, compiler: GrammarCompiler, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        """Raises GrammarInvalid when nothing can be matched over this vocabulary."""
        compiler.build()
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._vocab_size = compiler.vocab_size
        self._num_words = -(-compiler.vocab_size // 32)
        self._states: dict[int, _State] = {}
        self._is_pinned = device.type == "cuda"
        # Where the model runs on the processor its threads have the cores.
        num_threads = min(MAX_THREADS, available_cores())
        self._executor = None if device.type == "cpu" else LLExecutor(num_threads)

    def expect(self, sequences: Iterable[DecodingSequence]) -> None:
        """Begins to compile what these will need, while the device computes their logits."""
        for sequence in sequences:
            grammar = sequence.params.grammar
            if grammar is not None and sequence.seq_id not in self._states:
                self._compiler.compiled(grammar)

    def apply(self, logits: Tensor, rows: Mapping[int, SamplingRow]) -> dict[int, str]:
        """Makes the other tokens impossible in these rows of logits [n, vocab] (float32), in place.

        At least one token stays possible in each. The rows that are returned could not be followed
        and are unchanged; the text gives an ErrorCode and the reason, for the client.
        """
        indices, masks, failed = self.masks_of(rows)
        if indices:
            (_cap_on_device if logits.is_cuda else _cap_on_host)(logits, indices, masks)
        return failed

    def masks_of(
        self, rows: Mapping[int, SamplingRow]
    ) -> tuple[list[int], NDArray[np.int32], dict[int, str]]:
        """Returns which rows have a mask, the masks [n, ceil(vocab / 32)], and the other rows.

        A mask has one bit for each token that may come. The others are as `apply` returns them.
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
        indices = [i for i in matchers if i not in failed]
        if len(indices) < len(matchers):
            masks = masks[[n for n, i in enumerate(matchers) if i not in failed]]
        for mask, i in zip(masks, indices, strict=True):
            self._hold_back_ends(mask, rows[i])
        for i, why in failed.items():
            log.warning("a grammar could not be followed", extra={"seq_id": rows[i].seq_id})
            failed[i] = f"{ErrorCode.GRAMMAR_FAILED.value}: {why}"
        return indices, masks, failed

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees what was kept for these sequences; unknown ones are fine."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def _advanced(self, row: SamplingRow) -> LLMatcher:
        """Returns the row's matcher, with all its output tokens consumed. Raises GrammarInvalid."""
        assert len(row.output_token_ids) == row.num_outputs, "a structured row lacks a token"
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
        """Returns [matchers, ceil(vocab / 32)] int32, one bit for each token that may come.

        For CUDA they are filled where they are copied from.
        """
        shape = len(matchers), self._num_words
        masks = torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_pinned).numpy()
        num_bytes = self._num_words * masks.itemsize
        if self._executor is None:
            for mask, matcher in zip(masks, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
        elif matchers:
            numbered = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(
                numbered, masks.ctypes.data, num_bytes, len(matchers)
            )
        return masks

    def _hold_back_ends(self, mask: NDArray[np.int32], row: SamplingRow) -> None:
        """Applies `min_tokens` and `ignore_eos` as far as the grammar leaves a choice."""
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


def _cap_on_host(logits: Tensor, indices: Sequence[int], masks: NDArray[np.int32]) -> None:
    """Masks rows of `logits` [rows, vocab] in place; numpy takes half of torch's time."""
    for i, mask in zip(indices, masks.view(np.uint8), strict=True):
        row = logits[i].numpy()
        caps = _CAPS.take(mask, axis=0, mode="clip").reshape(-1)
        np.minimum(row, caps[: row.size], out=row)


def _cap_on_device(logits: Tensor, indices: Sequence[int], masks: NDArray[np.int32]) -> None:
    """Masks rows `indices` of `logits` [rows, vocab] float32 in place, on their device."""
    device = logits.device
    index = to_device(np.array(indices, dtype=np.int64), device)
    there = to_device(masks.view(np.uint8), device).flatten().int()
    caps = to_device(_CAPS, device).index_select(0, there).view(len(indices), -1)
    capped = torch.minimum(logits.index_select(0, index), caps[:, : logits.shape[1]])
    logits.index_copy_(0, index, capped)
