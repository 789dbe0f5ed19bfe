"""GrammarMasks: which tokens may come next in the rows whose output has to match a grammar.

Masks are made by threads beside the step, which release the interpreter's lock meanwhile. A grammar
whose masks take long has them made by a thread of its own with the lowest priority: no step
waits for those. RUN_LIMITS bound the work of a single mask; a row that needs more processor time
than its part, over its tokens, is given up.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from shared.cores import available_cores
from shared.cpu_time import TenantSeconds
from shared.messages import ErrorCode, Grammar, SamplingParams
from shared.text.base import GrammarInvalid, TextInvalid
from shared.text.grammar_compiler import (
    FIRST_CPU_SECONDS,
    MASK_CPU_SECONDS,
    TOO_SLOW,
    GrammarCompiler,
    matcher_error,
)
from shared.text.tokenizer import FastTokenizer
from worker.model.device import to_device
from worker.model.sampling.row import SamplingRow

MAX_THREADS = 8
STEP_WAIT_SECONDS = 0.02  # of a step, for masks that are mostly quick
SLOW_CPU_SECONDS = 0.005  # of a row's latest masks: beyond it no step waits for the next

# [256, 8] what the logits of eight tokens may be at most, by the bits of a byte, the lowest first.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CAPS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))

log = logging.getLogger(__name__)


class Constrained(Protocol):
    """A sequence as its masks see it: the engine's, or a request of vLLM's."""

    @property
    def seq_id(self) -> int: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tenant(self) -> str: ...


@dataclass(slots=True)
class _State:
    """A sequence's matcher, how far it has come, and the mask of what comes next.

    Only the thread that makes a mask changes it, until `made` is done.
    """

    tenant: str
    grammar: Grammar
    mask: NDArray[np.int32]  # [ceil(vocab / 32)], one bit for each token that may come
    made: Future[None] = field(default_factory=Future)
    num_outputs: int = -1  # before the token of which `made` is, or will be, the mask
    compiled: Future[LLMatcher] | None = None  # until `matcher` is there
    matcher: LLMatcher | None = None
    num_consumed: int = 0  # output tokens
    num_masks: int = 0
    cpu_s: float = 0.0  # of all its masks
    latest_s: float = 0.0  # of its latest masks, the last one counting half
    failure: str = ""  # why there is no mask

    @property
    def is_slow(self) -> bool:
        return self.latest_s > SLOW_CPU_SECONDS


class GrammarMasks:
    """Keeps a matcher for each structured sequence until it is forgotten.

    A matcher is a function of the grammar and the output tokens: one that is not there is made from
    them, so preemption, another engine and another worker change nothing. All output tokens of a
    row must be known: see StepHandle.sample_structured.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        eos_token_ids: frozenset[int],
        device: torch.device,
        *,
        is_waited_for: bool = False,
    ) -> None:
        """`is_waited_for`: each step waits for all masks, so slow ones have no thread that yields
        to others. Raises GrammarInvalid when nothing can be matched over this vocabulary."""
        compiler.build()
        self.times = TenantSeconds()
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._vocab_size = compiler.vocab_size
        self._num_words = -(-compiler.vocab_size // 32)
        self._states: dict[int, _State] = {}
        self._is_waited_for = is_waited_for
        self._is_pinned = device.type == "cuda"
        # Where the model runs on the processor its threads have the cores.
        self._num_threads = 1 if device.type == "cpu" else min(MAX_THREADS, available_cores())
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")
        self._slow_thread = ThreadPoolExecutor(1, "slow-masks", initializer=_lower_priority)

    def expect(self, sequences: Iterable[Constrained]) -> None:
        """Begins to compile what these will need, while the device computes their logits."""
        for sequence in sequences:
            grammar = sequence.params.grammar
            if grammar is not None and sequence.seq_id not in self._states:
                self._compiled(grammar, sequence.tenant)

    def begin(self, rows: Iterable[SamplingRow]) -> None:
        """Begins to make the masks of these rows, as far as they are not there or under way."""
        quick: list[tuple[_State, list[int]]] = []
        for row in rows:
            assert len(row.output_token_ids) == row.num_outputs, "a structured row lacks a token"
            state = self._states.get(row.seq_id)
            if state is None:
                assert row.params.grammar is not None, "of structured rows only"
                mask = np.zeros(self._num_words, dtype=np.int32)
                state = self._states[row.seq_id] = _State(row.tenant, row.params.grammar, mask)
            elif state.num_outputs == row.num_outputs:
                continue
            else:
                state.made.result()  # of the token before: it is there
            state.made, state.num_outputs = Future(), row.num_outputs
            item = (state, list(row.output_token_ids[state.num_consumed :]))
            if state.matcher is None and state.compiled is None:
                state.compiled = self._compiled(state.grammar, state.tenant)
            if state.compiled is not None and not state.compiled.done():
                state.compiled.add_done_callback(partial(self._submit_compiled, item))
            elif state.is_slow and not self._is_waited_for:
                self._submit(self._slow_thread, [item])
            else:
                quick.append(item)
        for i in range(min(self._num_threads, len(quick))):
            self._submit(self._threads, quick[i :: self._num_threads])

    def unready(self, rows: Collection[SamplingRow]) -> dict[int, Future[None]]:
        """Returns what rows wait for that have no mask yet, by seq_id, a short while after `begin`.

        A row that is not in it has its mask, or has failed.
        """
        states = {row.seq_id: self._states[row.seq_id] for row in rows}
        if all(state.made.done() for state in states.values()):
            return {}
        wait([s.made for s in states.values() if not s.is_slow], STEP_WAIT_SECONDS)
        return {i: state.made for i, state in states.items() if not state.made.done()}

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
        Waits for masks that are not there. For CUDA they lie where they are copied from.
        """
        self.begin(rows.values())
        states = {i: self._states[row.seq_id] for i, row in rows.items()}
        for state in states.values():
            state.made.result()
        failed = {i: state.failure for i, state in states.items() if state.failure}
        indices = [i for i in states if i not in failed]
        shape = len(indices), self._num_words
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._is_pinned).numpy()
        for mask, i in zip(masks, indices, strict=True):
            mask[:] = states[i].mask
            self._hold_back_ends(mask, rows[i])
        for i, why in failed.items():
            log.warning(
                "a request failed in its grammar", extra={"seq_id": rows[i].seq_id, "reason": why}
            )
            failed[i] = f"{ErrorCode.GRAMMAR_FAILED.value}: {why}"
        return indices, masks, failed

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def _compiled(self, grammar: Grammar, tenant: str) -> Future[LLMatcher]:
        return self._compiler.compiled(grammar, partial(self.times.add, tenant))

    def _submit_compiled(self, item: tuple[_State, list[int]], _: Future[LLMatcher]) -> None:
        self._submit(self._threads, [item])

    def _submit(
        self, threads: ThreadPoolExecutor, items: Sequence[tuple[_State, list[int]]]
    ) -> None:
        try:
            threads.submit(self._make_all, items)
        except RuntimeError as error:  # the process ends, or can have no more threads
            for state, _ in items:
                state.made.set_exception(RuntimeError(f"a mask could not be made: {error}"))

    def _make_all(self, items: Sequence[tuple[_State, list[int]]]) -> None:
        """Makes masks, of each item's state after its new tokens."""
        for state, new in items:
            begun_s = time.thread_time()
            try:
                self._make(state, new)
            except GrammarInvalid as error:
                state.failure = str(error)
            except BaseException as error:  # as a panic in Rust is raised
                state.made.set_exception(RuntimeError(f"a mask could not be made: {error}"))
                continue
            finally:  # failed masks and the reading of a resumed text took time as well
                self.times.add(state.tenant, time.thread_time() - begun_s)
            state.made.set_result(None)

    def _make(self, state: _State, new: list[int]) -> None:
        """Makes one mask. Raises GrammarInvalid."""
        matcher = state.matcher
        if matcher is None:  # a text that is resumed is read whole: that is no mask's time
            assert state.compiled is not None, "made after its compilation"
            matcher = state.matcher = state.compiled.result().deep_copy()
            state.compiled = None
            self._consume(state, matcher, new)
            new = []
        begun_s = time.thread_time()
        self._consume(state, matcher, new)
        matcher.unsafe_compute_mask_ptr(state.mask.ctypes.data, state.mask.nbytes)
        took_s = time.thread_time() - begun_s
        if matcher.is_error():  # too much work for one step, or no token that fits
            raise GrammarInvalid(matcher_error(matcher))
        state.num_masks += 1
        state.cpu_s += took_s
        state.latest_s = (state.latest_s + took_s) / 2
        if state.cpu_s > FIRST_CPU_SECONDS + MASK_CPU_SECONDS * state.num_masks:
            raise GrammarInvalid(TOO_SLOW)

    def _consume(self, state: _State, matcher: LLMatcher, new: list[int]) -> None:
        if new and not matcher.consume_tokens(new):
            raise GrammarInvalid(
                f"the output so far does not follow the grammar: {matcher_error(matcher)}"
            )
        state.num_consumed += len(new)

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


def _lower_priority() -> None:
    """Gives this thread the lowest priority, where a thread can have one of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def grammar_masks(
    tokenizer: FastTokenizer, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
) -> GrammarMasks | None:
    """Returns None, and logs why, where nothing can be matched over this vocabulary."""
    try:
        compiler = GrammarCompiler(tokenizer, vocab_size, sorted(eos_token_ids))
        return GrammarMasks(compiler, eos_token_ids, device)
    except (TextInvalid, GrammarInvalid) as error:
        log.warning("structured output is off: %s", error)
        return None
