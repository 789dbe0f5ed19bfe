"""RankForward: computes a step at a rank that does not sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.batch import DecodeStep, ScheduledBatch
from worker.model.base import DecoderStack
from worker.model.kv_offload import HostBlocks
from worker.model.sampling.base import PreviousSample
from worker.model.sampling.prompt_scorer import logits_by_part
from worker.model.served import ServedModel
from worker.model.step.forward_batch import ForwardBatch, KeptBatch


class RankForward:
    """Computes steps as TorchModelRunner does at rank 0, up to the logits: the same collectives in
    the same order."""

    def __init__(
        self,
        model: ServedModel,
        stack: DecoderStack,
        *,
        block_size: int,
        max_num_seqs: int,
        shares_tokens: bool,
        num_kv_groups: int = 1,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        """`shares_tokens`: a step's token ids come from rank 0's device. `host_blocks` are of this
        rank's part of the KV cache."""
        self._model = model
        self._stack = stack
        self._block_size = block_size
        self._shares_tokens = shares_tokens
        self._host_blocks = host_blocks
        self._device = model.placement.device
        self._unknown = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._last: DecodeStep | None = None  # of the step before
        self._kept = KeptBatch(
            max_num_seqs, block_size, model.config.vocab_size, self._device, num_kv_groups
        )

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, sampled: Sequence[int] = ()) -> None:
        """Computes one step; without sequences it computes nothing. After an exception no other
        step can be computed. `sampled` are the tokens of a run of decodes that continues, where
        they do not come from rank 0's device."""
        if self._host_blocks is not None:
            self._host_blocks.run(batch.transfers)
        self._kept.forget(batch.finished_seq_ids)
        if not len(batch):
            return
        model = self._model
        forward = ForwardBatch.build(
            batch,
            block_size=self._block_size,
            vocab_size=model.config.vocab_size,
            device=self._device,
            previous=PreviousSample(self._token_ids(sampled), {}, self._last),
            kept=self._kept,
        )
        self._last = batch.decodes
        if self._shares_tokens:
            model.placement.group.broadcast(forward.input_ids)
        rows = forward.logits_rows
        hidden = self._stack(forward.input_ids, forward.positions, forward.metadata, rows)
        if forward.scored is not None:
            for _ in logits_by_part(model, hidden, forward.scored):
                pass  # rank 0 has them
        if not forward.num_sampled:
            return
        if forward.sampled is not None:
            hidden = hidden.index_select(0, forward.sampled)
        model.logits(hidden)

    def _token_ids(self, sampled: Sequence[int]) -> Tensor:
        """Returns at least as many as the run has sequences, int64."""
        if self._shares_tokens or not sampled:
            return self._unknown
        return torch.tensor(sampled, dtype=torch.int64, device=self._device)
