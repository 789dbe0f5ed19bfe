"""TorchModelRunner: a ScheduledBatch in, sampled tokens out, on the CPU or on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from shared.messages import ErrorCode, TokenLogprob
from worker.engine.batch import ScheduledBatch
from worker.engine.ports import StepResult
from worker.model.base import DecoderStack
from worker.model.device import StepTimer, step_failure
from worker.model.kv_offload import HostBlocks
from worker.model.sampling.base import PreviousSample
from worker.model.sampling.partial import PartialSample
from worker.model.sampling.prompt_scorer import PromptScores, score_prompts
from worker.model.sampling.row import RowThreads, SamplingRow
from worker.model.sampling.rows import SamplingRows
from worker.model.sampling.sampler import Sampled, Sampler
from worker.model.served import CapturingStack, OtherRanks, Report, ServedModel
from worker.model.step.forward_batch import ForwardBatch, KeptBatch

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks

T = TypeVar("T")

_NONFINITE = ErrorCode.NONFINITE_LOGITS.value


class TorchModelRunner:
    """Implements worker.engine.ports.ModelRunner for lookahead 0 and 1.

    Serves one engine for life: sequences are known by their ids, which are unique in one engine.
    Everything that touches the KV cache is enqueued on one stream, so a block may change hands as
    soon as a step is launched: the old owner's writes come first. The token of a sequence whose
    last step is not collected yet is taken from that step's sample on the device.
    """

    def __init__(
        self,
        model: ServedModel,
        stack: DecoderStack,
        *,
        block_size: int,
        max_num_seqs: int,
        grammar_masks: GrammarMasks | None = None,
        sampler_threads: int = 1,
        ranks: OtherRanks | None = None,
        shares_tokens: bool = False,
        num_kv_groups: int = 1,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        """`stack` computes the model's layers. Without `grammar_masks` no sequence may have a
        grammar. `sampler_threads` draw from rows of logits and score them: more than one where
        torch itself has one. `ranks` have the rest of the model: they compute each step too. With
        `shares_tokens` they get its tokens by the device, as the host may not know the last.
        `host_blocks` make the batches' transfers."""
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._stack = stack
        self._block_size = block_size
        self._device = model.placement.device
        self._grammar_masks = grammar_masks
        self._ranks = ranks
        self._shares_tokens = shares_tokens
        self._host_blocks = host_blocks
        self._row_threads = RowThreads(sampler_threads)
        self._sampler = Sampler(
            self.vocab_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=model.config.eos_token_ids,
            device=self._device,
            grammar_masks=grammar_masks,
            row_threads=self._row_threads,
        )
        self._nothing_sampled = PreviousSample(
            torch.empty(0, dtype=torch.int64, device=self._device), {}
        )
        self._previous = self._nothing_sampled
        self._kept = KeptBatch(
            max_num_seqs, block_size, self.vocab_size, self._device, num_kv_groups
        )
        self._sampling_rows = SamplingRows()
        self._captured = stack if isinstance(stack, CapturingStack) else None
        self._newest: TorchStepHandle | None = None  # the step before

    def launch(self, batch: ScheduledBatch) -> TorchStepHandle:
        """Enqueues a step; never waits for a CUDA device.

        After an exception no sample of a step before is known, and the state kept between steps, of
        which the step may have written a part, is made anew. Raises OutOfMemory or DeviceLost, or
        what else a step raised.
        """
        return self._reset_on_failure(lambda: self._launch(batch))

    def capture(self, report: Report) -> None:
        """Captures the stack's steps, where it replays them. Raises what a step raises."""
        if self._captured is not None:
            self._captured.capture(report)

    def _reset_on_failure(self, compute: Callable[[], T]) -> T:
        """Returns what a part of a step returns; raises as `launch` does."""
        try:
            return _computed(self._device, compute)
        except Exception:
            self._kept.forget_all()
            self._sampler.forget_all()
            raise

    @torch.inference_mode()
    def _launch(self, batch: ScheduledBatch) -> TorchStepHandle:
        if batch.transfers:
            assert self._host_blocks is not None, "an engine with offload blocks has a place"
            self._host_blocks.run(batch.transfers)
        handle = TorchStepHandle(self._device)
        previous, self._previous = self._previous, self._nothing_sampled
        self._sampler.forget(batch.finished_seq_ids)
        self._kept.forget(batch.finished_seq_ids)
        self._sampling_rows.forget(batch.finished_seq_ids)
        if not len(batch):
            self._previous = previous
            if self._ranks is not None:
                self._ranks.send(batch)
            handle.end()
            return handle
        forward = ForwardBatch.build(
            batch,
            block_size=self._block_size,
            vocab_size=self.vocab_size,
            device=self._device,
            previous=previous,
            kept=self._kept,
        )
        if self._grammar_masks is not None:
            self._grammar_masks.expect(batch.others)
            if batch.decodes is not None and batch.decodes.number == 0:
                self._grammar_masks.expect(batch.decodes.run.sequences)
        if self._ranks is not None:
            self._ranks.send(batch)
        rows, index_of = self._sampling_rows.of(batch, previous)
        structured = self._sampling_rows.structured(rows)
        runs_ahead = self._runs_ahead
        if structured and not runs_ahead:
            self._masks.begin([rows[i] for i in structured])
        try:
            hidden, scores = self._compute(forward)
            sampled = None if structured else self._best_tokens(rows)
            logits = None
            if sampled is None and rows:
                logits = self._model.logits(hidden)
        except Exception as error:
            if self._ranks is not None:
                self._ranks.lost(error)
            raise
        if scores is not None:
            handle.add_scores(scores)
        if sampled is not None:
            self._previous = PreviousSample(sampled.token_ids, index_of, batch.decodes)
            handle.add(index_of, sampled)
        elif logits is not None:
            waiting = structured
            if structured and not runs_ahead:
                handle.end()
                unready = self._masks.unready([rows[i] for i in structured])
                handle.begin_again()
                waiting = [i for i in structured if rows[i].seq_id in unready]
                handle.put_off(unready)
            if waiting:
                sample = PartialSample(self._sampler, logits, rows, previous.token_ids)
                this = PreviousSample(sample.token_ids, index_of, batch.decodes)
                self._draw_some(handle, sample, waiting, this, runs_ahead=runs_ahead)
            else:
                sampled = self._sampler.sample(logits, rows, previous.token_ids)
                self._previous = PreviousSample(sampled.token_ids, index_of, batch.decodes)
                handle.add(index_of, sampled)
        handle.end()
        self._newest = handle
        return handle

    @property
    def _masks(self) -> GrammarMasks:
        assert self._grammar_masks is not None, "jobs with a grammar are refused without masks"
        return self._grammar_masks

    @property
    def _runs_ahead(self) -> bool:
        """Whether the step before is in flight, and rows with a grammar may lack a token."""
        return self._newest is not None and not self._newest.is_collected

    def _draw_some(
        self,
        handle: TorchStepHandle,
        sample: PartialSample,
        waiting: Collection[int],
        this: PreviousSample,
        *,
        runs_ahead: bool,
    ) -> None:
        """Draws all rows but the waiting ones: these are drawn when the step before is known, where
        that is in flight, and were put off otherwise."""
        rows = sample.rows
        others = sorted(set(range(len(rows))).difference(waiting))
        if others:
            handle.add([rows[i].seq_id for i in others], sample.draw(others))
        if not runs_ahead:
            self._previous = this
            return
        places = {rows[i].seq_id: i for i in waiting}
        rest = functools.partial(self._draw_rest, handle, sample, places, this)
        handle.wait_with(lambda seq_ids: self._reset_on_failure(lambda: rest(seq_ids)))

    @torch.inference_mode()
    def _draw_rest(
        self,
        handle: TorchStepHandle,
        sample: PartialSample,
        places: Mapping[int, int],
        this: PreviousSample,
        seq_ids: Collection[int],
    ) -> None:
        """Draws the rows that waited, which have these `places` by sequence: of `seq_ids`; the
        others have ended, and their token stays 0. Those whose mask is not ready are put off. Then
        the step's sample is complete."""
        wanted = set(seq_ids)
        rows = [sample.rows[i] for seq_id, i in places.items() if seq_id in wanted]
        self._masks.begin(rows)
        unready = self._masks.unready(rows)
        handle.begin_again()
        handle.put_off(unready)
        drawn = [row.seq_id for row in rows if row.seq_id not in unready]
        if drawn:
            handle.add(drawn, sample.draw([places[seq_id] for seq_id in drawn]))
        handle.add_ended([seq_id for seq_id in places if seq_id not in wanted])
        handle.end()
        self._previous = this

    def _compute(self, forward: ForwardBatch) -> tuple[Tensor, PromptScores | None]:
        """Returns hidden states [rows, hidden] of the sampled rows, and the scores, if any."""
        if self._shares_tokens:
            self._model.placement.group.broadcast(forward.input_ids)
        rows = forward.logits_rows
        hidden = self._stack(forward.input_ids, forward.positions, forward.metadata, rows)
        scores = None
        if forward.scored is not None:
            scores = score_prompts(self._model, hidden, forward.scored, self._row_threads)
        if forward.sampled is not None:
            hidden = hidden.index_select(0, forward.sampled)
        return hidden, scores

    def _best_tokens(self, rows: list[SamplingRow]) -> Sampled | None:
        """Returns what the stack has captured of the rows of its last call, where they want it."""
        if self._captured is None or not rows or not self._sampler.wants_best(rows):
            return None
        best = self._captured.best_tokens()
        if best is None:
            return None
        token_ids, best_logits = best
        return Sampled(token_ids[: len(rows)], best_logits[: len(rows)], None)


class TorchStepHandle:
    """A launched step: its results are on their way to the host."""

    __slots__ = (
        "_device",
        "_ended",
        "_parts",
        "_put_off",
        "_rest",
        "_scores",
        "_timer",
        "is_collected",
    )

    def __init__(self, device: torch.device) -> None:
        """Marks the beginning of the step's work."""
        self._device = device
        self._timer = StepTimer(device)
        self._parts: list[_Part] = []
        self._ended: list[int] = []  # sequences
        self._put_off: dict[int, Future[None]] = {}
        self._scores: PromptScores | None = None
        self._rest: Callable[[Collection[int]], None] | None = None
        self.is_collected = False

    def add(self, seq_ids: Collection[int], sampled: Sampled) -> None:
        """Adds rows that were drawn, of these sequences."""
        self._parts.append(_Part(seq_ids, sampled.to_host()))

    def add_ended(self, seq_ids: Sequence[int]) -> None:
        """Adds sequences that want no token any more."""
        self._ended += seq_ids

    def put_off(self, unready: Mapping[int, Future[None]]) -> None:
        """Adds sequences that get no token in this step, with what they wait for."""
        self._put_off |= unready

    def add_scores(self, scores: PromptScores) -> None:
        self._scores = scores.to_host()

    def wait_with(self, rest: Callable[[Collection[int]], None]) -> None:
        """Has `sample_structured` call this."""
        self._rest = rest

    def end(self) -> None:
        """Marks the end of the step's work, as far as it is enqueued."""
        self._timer.end()

    def begin_again(self) -> None:
        """Marks the beginning of work that the host had to wait for, after an end."""
        self._timer.begin()

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        """Enqueues the rest of the step. Raises as `launch` does."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest(seq_ids)
        return self._put_off

    def collect(self) -> StepResult:
        """Waits until the device has sampled. Raises as `launch` does."""
        self.is_collected = True
        self._rest = None
        return _computed(self._device, self._collect)

    def _collect(self) -> StepResult:
        device_s = self._timer.wait()
        scores, failed = self._scores.by_sequence() if self._scores is not None else ({}, {})
        token_ids, failed = dict.fromkeys(self._ended, 0), dict(failed)
        logprobs: dict[int, TokenLogprob] = {}
        for part in self._parts:
            part.read(token_ids, logprobs, failed)
        return StepResult(token_ids, logprobs, failed, scores, device_s)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that were drawn together."""

    seq_ids: Collection[int]  # in the order of the rows
    sampled: Sampled  # on the host

    def read(
        self,
        token_ids: dict[int, int],
        logprobs: dict[int, TokenLogprob],
        failed: dict[int, str],
    ) -> None:
        """Adds the sampled tokens to a step's results."""
        sampled = self.sampled
        drawn = sampled.token_ids.tolist()
        is_finite = torch.isfinite(sampled.best_logits)
        by_row = sampled.logprobs.by_row(drawn) if sampled.logprobs is not None else {}
        if not (sampled.failed or by_row) and bool(is_finite.all()):
            token_ids.update(zip(self.seq_ids, drawn, strict=True))
            return
        bad = {i: _NONFINITE for i, ok in enumerate(is_finite.tolist()) if not ok}
        bad |= sampled.failed
        for i, seq_id in enumerate(self.seq_ids):
            if i in bad:
                failed[seq_id] = bad[i]
                continue
            token_ids[seq_id] = drawn[i]
            if i in by_row:
                logprobs[seq_id] = by_row[i]


def _computed(device: torch.device, compute: Callable[[], T]) -> T:
    """Returns what `compute` does. Raises OutOfMemory or DeviceLost for what means that."""
    try:
        return compute()
    except Exception as error:
        failure = step_failure(error, device)
        if failure is None:
            raise
    # Not in the clause above: the error's traceback holds the step's tensors.
    raise failure
