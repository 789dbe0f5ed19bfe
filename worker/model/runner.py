"""TorchModelRunner: a ScheduledBatch in, sampled tokens out, on the CPU or on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.messages import ErrorCode
from worker.engine.batch import ScheduledBatch
from worker.engine.ports import StepResult
from worker.model.device import step_failure
from worker.model.forward_batch import ForwardBatch, KeptBatch, PreviousSample
from worker.model.layers.decoder import DecoderStack
from worker.model.sampling.prompt_scorer import PromptScores, score_prompts
from worker.model.sampling.row import RowThreads
from worker.model.sampling.rows import SamplingRows
from worker.model.sampling.sampler import Sampled, Sampler
from worker.model.served import OtherRanks, ServedModel

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks


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
    ) -> None:
        """`stack` computes the model's layers. Without `grammar_masks` no sequence may have a
        grammar. `sampler_threads` draw from rows of logits and score them: more than one where
        torch itself has one. `ranks` have the rest of the model: they compute each step too. With
        `shares_tokens` they get its tokens by the device, as the host may not know the last."""
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._stack = stack
        self._block_size = block_size
        self._device = model.placement.device
        self._grammar_masks = grammar_masks
        self._ranks = ranks
        self._shares_tokens = shares_tokens
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
        self._kept = KeptBatch(max_num_seqs, block_size, self.vocab_size, self._device)
        self._sampling_rows = SamplingRows()

    def launch(self, batch: ScheduledBatch) -> TorchStepHandle:
        """Enqueues a step; never waits for a CUDA device.

        After an exception no sample of a step before is known, and what is kept between steps, of
        which the step may have written a part, is made anew. Raises OutOfMemory or DeviceLost, or
        what else a step raised.
        """
        try:
            return self._launch(batch)
        except Exception as error:
            self._kept.forget_all()
            self._sampler.forget_all()
            failure = step_failure(error, self._device)
            if failure is None:
                raise
        # Not in the clause above: the error's traceback holds the step's tensors.
        raise failure

    @torch.inference_mode()
    def _launch(self, batch: ScheduledBatch) -> TorchStepHandle:
        previous, self._previous = self._previous, self._nothing_sampled
        self._sampler.forget(batch.finished_seq_ids)
        self._kept.forget(batch.finished_seq_ids)
        self._sampling_rows.forget(batch.finished_seq_ids)
        if not len(batch):
            self._previous = previous
            if self._ranks is not None:
                self._ranks.send(batch)
            return TorchStepHandle({}, None, self._device)
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
        try:
            logits, scores = self._compute(forward)
        except Exception as error:
            if self._ranks is not None:
                self._ranks.lost(error)
            raise
        if logits is None:
            return TorchStepHandle({}, None, self._device, scores)
        rows, index_of = self._sampling_rows.of(batch, previous)
        sampled = self._sampler.sample(logits, rows, previous.token_ids)
        self._previous = PreviousSample(sampled.token_ids, index_of, batch.decodes)
        return TorchStepHandle(index_of, sampled, self._device, scores)

    def _compute(self, forward: ForwardBatch) -> tuple[Tensor | None, PromptScores | None]:
        """Returns the logits [rows, vocab] to sample from and the scores, where there are any."""
        if self._shares_tokens:
            self._model.placement.group.broadcast(forward.input_ids)
        rows = forward.logits_rows
        hidden = self._stack(forward.input_ids, forward.positions, forward.metadata, rows)
        scores = None
        if forward.scored is not None:
            scores = score_prompts(self._model, hidden, forward.scored, self._row_threads)
        if not forward.num_sampled:
            return None, scores
        if forward.sampled is not None:
            hidden = hidden.index_select(0, forward.sampled)
        return self._model.logits(hidden), scores


class TorchStepHandle:
    """A launched step: its results are on their way to the host."""

    def __init__(
        self,
        index_of: Mapping[int, int],
        sampled: Sampled | None,
        device: torch.device,
        scores: PromptScores | None = None,
    ) -> None:
        self._index_of = index_of
        self._device = device
        self._sampled = sampled.to_host() if sampled is not None else None
        self._scores = scores.to_host() if scores is not None else None
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda" and not (sampled is None and scores is None):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def collect(self) -> StepResult:
        """Waits until the device has sampled. Raises as `launch` does."""
        try:
            return self._collect()
        except Exception as error:
            failure = step_failure(error, self._device)
            if failure is None:
                raise
        raise failure

    def _collect(self) -> StepResult:
        if self._arrived is not None:
            self._arrived.synchronize()
        scores, unscored = self._scores.by_sequence() if self._scores is not None else ({}, {})
        sampled = self._sampled
        if sampled is None:
            return StepResult({}, failed=unscored, prompt_logprobs=scores)
        token_ids = sampled.token_ids.tolist()
        is_finite = torch.isfinite(sampled.best_logits)
        logprobs = sampled.logprobs.by_row(token_ids) if sampled.logprobs is not None else {}
        if not (sampled.failed or unscored or logprobs) and bool(is_finite.all()):
            return StepResult(
                dict(zip(self._index_of, token_ids, strict=True)), prompt_logprobs=scores
            )
        failed = {
            i: ErrorCode.NONFINITE_LOGITS.value for i, ok in enumerate(is_finite.tolist()) if not ok
        }
        failed |= sampled.failed
        good = {seq_id: i for seq_id, i in self._index_of.items() if i not in failed}
        return StepResult(
            token_ids={seq_id: token_ids[i] for seq_id, i in good.items()},
            logprobs={seq_id: logprobs[i] for seq_id, i in good.items() if i in logprobs},
            failed={
                **unscored,
                **{seq_id: failed[i] for seq_id, i in self._index_of.items() if i in failed},
            },
            prompt_logprobs=scores,
        )
