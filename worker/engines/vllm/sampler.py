"""PenstockLogitsProcessor: this project's sampler inside vLLM.

vLLM takes the largest logit of each row (temperature 0). This processor draws the token as
worker.model.sampling does, from the request's own parameters, history and seed, and makes it the
largest of its row. So a request continues exactly where another engine left it.

Log probabilities and failures do not fit into a row of logits: the engine takes them from here, by
a call to vLLM's workers. A row that failed yields token FAILED_TOKEN, upon which the engine looks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from shared.messages import ErrorCode, TokenLogprob
from shared.text.base import GrammarInvalid
from shared.text.checkpoint_text import load_tokenizer_and_eos
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.tokenizer import FastTokenizer
from worker.engines.vllm.requests import FAILED_TOKEN, from_extra_args
from worker.engines.vllm.rows import BatchRow, BatchRows
from worker.engines.vllm.vllm_compat import logits_processors_of
from worker.model.device import to_device, to_host
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.row import RowThreads
from worker.model.sampling.sampler import Sampled, Sampler

log = logging.getLogger(__name__)

# vLLM has at most two steps in flight when the engine looks at the older one.
_KEPT_STEPS = 4
_LARGEST = torch.finfo(torch.float32).max


class Report(NamedTuple):
    """The sampler's report on one drawn token: log probabilities, a failure."""

    seq_id: int
    output_index: int  # of the token, among the request's outputs
    logprob: TokenLogprob | None
    failure: str  # an ErrorCode, or one and the reason; empty: it was drawn


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step drew, on its way to the host."""

    rows: Mapping[int, tuple[int, int]]  # place in the batch: seq_id and output index
    is_nan: Tensor  # [rows] bool
    places: tuple[int, ...]  # in the batch, of the rows that the sampler drew
    sampled: Sampled | None
    arrived: torch.cuda.Event | None

    def reports(self) -> list[Report]:
        failed = dict.fromkeys(self.is_nan.nonzero().flatten().tolist(), _NONFINITE)
        logprobs: dict[int, TokenLogprob] = {}
        if self.sampled is not None:
            is_finite = torch.isfinite(self.sampled.best_logits).tolist()
            failed |= {
                p: _NONFINITE for p, ok in zip(self.places, is_finite, strict=True) if not ok
            }
            failed |= {self.places[i]: why for i, why in self.sampled.failed.items()}
            if self.sampled.logprobs is not None:
                by_row = self.sampled.logprobs.by_row(self.sampled.token_ids.tolist())
                logprobs = {self.places[i]: logprob for i, logprob in by_row.items()}
        return [
            Report(*self.rows[place], logprobs.get(place), failed.get(place, ""))
            for place in sorted(failed.keys() | logprobs.keys())
            if place in self.rows  # others are no requests of this project
        ]

    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


_NONFINITE = ErrorCode.NONFINITE_LOGITS.value


class PenstockLogitsProcessor(LogitsProcessor):
    """Draws the tokens of all rows whose requests carry our sampling parameters."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model_config = vllm_config.model_config
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        tokenizer, ends = load_tokenizer_and_eos(Path(model_config.model))
        eos = frozenset(ends)
        vocab_size = model_config.get_vocab_size()
        self._device = device
        self._compiler = _compiler(tokenizer, vocab_size, sorted(eos))
        self._masks = None
        if self._compiler:
            self._masks = GrammarMasks(self._compiler, eos, device, is_waited_for=True)
        self._sampler = Sampler(
            vocab_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos,
            device=device,
            row_threads=RowThreads(torch.get_num_threads() if device.type == "cpu" else 1),
            grammar_masks=self._masks,
        )
        self._rows = BatchRows(max_left=max_num_seqs)
        self._present: list[tuple[int, BatchRow]] = []
        self._tracked: list[tuple[int, BatchRow]] = []  # those that are not plain from the start
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._nothing_before = torch.empty(0, dtype=torch.int64, device=device)

    def is_argmax_invariant(self) -> bool:
        """Returns False: this processor decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.remove(index)
        for index, params, prompt, output in batch_update.added:
            found = from_extra_args(params.extra_args)
            if found is None:
                rows.add(index, None)
                continue
            assert prompt is not None, "a request of this project has a prompt of tokens"
            rows.add(index, BatchRow.of(*found, prompt, output))
            if self._masks is not None:
                self._masks.expect([found])
        for source, target, direction in batch_update.moved:
            rows.move(source, target, swap=direction is MoveDirectionality.SWAP)
        self._sampler.forget(rows.forgotten())
        self._present = rows.present()
        self._tracked = [(place, row) for place, row in self._present if not row.is_plain]

    def apply(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocab] whose largest entry in each of our rows is the drawn token.

        Greedy rows are not changed.
        """
        is_nan = logits[:, 0].isnan()  # a row with any non-finite input is NaN here
        drawn = self._drawn()
        sampled = None
        if drawn:
            sampled = self._draw(logits, drawn)
        self._note(is_nan, [place for place, _ in drawn], sampled)
        return logits

    @property
    def keeps_to_grammars(self) -> bool:
        """Returns whether an output over this vocabulary can be kept to a grammar."""
        return self._compiler is not None

    def take_reports(self) -> list[Report]:
        """Returns the reports of complete steps, each once."""
        reports = []
        while self._steps and self._steps[0].has_arrived():
            reports += self._steps.popleft().reports()
        return reports

    def drain_masks(self) -> dict[str, float]:
        """Returns the processor seconds of masks since the last call, by tenant."""
        return self._masks.times.drain() if self._masks is not None else {}

    def _drawn(self) -> list[tuple[int, BatchRow]]:
        """Returns the rows whose token is not just the largest logit, moved on to this step."""
        drawn = []
        for place, row in self._tracked:
            if not row.advance():  # vLLM has taken tokens back
                self._sampler.forget([row.sampling.seq_id])
            if row.plain_from is None or row.num_outputs < row.plain_from:
                drawn.append((place, row))
        return drawn

    def _draw(self, logits: Tensor, drawn: Sequence[tuple[int, BatchRow]]) -> Sampled:
        """Draws for these rows of `logits` [rows, vocab] and makes each token the largest."""
        places = to_device(np.array([place for place, _ in drawn], dtype=np.int64), self._device)
        is_whole = len(drawn) == len(logits)
        edited = logits if is_whole else logits.index_select(0, places)
        rows = [row.sampling for _, row in drawn]
        sampled = self._sampler.draw(edited, rows, self._nothing_before)
        is_bad = ~sampled.best_logits.isfinite()
        if sampled.failed:
            failed = to_device(np.array(list(sampled.failed), dtype=np.int64), self._device)
            is_bad.index_fill_(0, failed, True)
        # NaN is larger than anything, for vLLM too.
        token_ids = sampled.token_ids.masked_fill(is_bad, FAILED_TOKEN)
        largest = torch.where(is_bad, torch.nan, _LARGEST)
        logits.index_put_((places, token_ids), largest)
        return sampled

    def _note(self, is_nan: Tensor, places: list[int], sampled: Sampled | None) -> None:
        on_host = self._device.type != "cuda"
        if on_host and not _is_notable(is_nan, sampled):
            return
        rows = {place: (row.sampling.seq_id, row.num_outputs) for place, row in self._present}
        sampled = sampled.to_host() if sampled is not None else None
        is_nan = to_host(is_nan)
        arrived = None
        if not on_host:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._steps.append(_Step(rows, is_nan, tuple(places), sampled, arrived))


def take_reports(worker: Any) -> list[Report]:
    """Returns the reports of the processor in a worker of vLLM's, which calls this."""
    return [report for each in _processors(worker) for report in each.take_reports()]


def drain_masks(worker: Any) -> dict[str, float]:
    """Returns what masks took in a worker of vLLM's, which calls this."""
    return {
        tenant: seconds
        for each in _processors(worker)  # one at most
        for tenant, seconds in each.drain_masks().items()
    }


def keeps_to_grammars(worker: Any) -> bool:
    """Returns whether the processor in a worker of vLLM's, which calls this, can do so."""
    return all(each.keeps_to_grammars for each in _processors(worker))


def _processors(worker: Any) -> list[PenstockLogitsProcessor]:
    found = logits_processors_of(worker)
    return [each for each in found if isinstance(each, PenstockLogitsProcessor)]


def _is_notable(is_nan: Tensor, sampled: Sampled | None) -> bool:
    """Returns whether a step on the host has anything to report."""
    if sampled is not None and (sampled.failed or sampled.logprobs is not None):
        return True
    return bool(is_nan.any()) or (sampled is not None and not sampled.best_logits.isfinite().all())


def _compiler(
    tokenizer: FastTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler | None:
    """Returns None, and logs why, where no output can be kept to a grammar."""
    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    try:
        compiler.build()
    except GrammarInvalid as error:
        log.warning("structured output is unavailable for this model", extra={"reason": str(error)})
        return None
    return compiler
