"""ForwardBatch: a ScheduledBatch as tensors on the model's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.model.attention.base import AttentionMetadata
from worker.model.device import to_device
from worker.model.sampling.prompt_scorer import ScoredRows, rows_with_scores

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class PreviousSample:
    """What the step before sampled, still on the device: `token_ids[index_of[seq_id]]`."""

    token_ids: Tensor  # [rows] int64
    index_of: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences, flat, in batch order; int32 throughout."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    logits_rows: Tensor  # [N] tokens whose logits are sampled from, or score a prompt, in order
    sampling: tuple[ScheduledSequence, ...]  # the sequences that are sampled from
    sampled: Tensor | None  # [len(sampling)] their places among the N; None: they are all of them
    scored: ScoredRows | None  # the places of all others, and what they score
    metadata: AttentionMetadata

    @classmethod
    def build(
        cls,
        batch: ScheduledBatch,
        *,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        previous: PreviousSample,
    ) -> ForwardBatch:
        """Returns the batch, by one transfer to the device that is not waited for.

        Raises ValueError where the schedule contradicts itself: a block table that is too short, a
        token outside the vocabulary, or one neither known nor sampled in the step before.
        """
        sequences = batch.sequences
        query_lens = tuple(s.num_scheduled_tokens for s in sequences)
        context_lens = tuple(s.end for s in sequences)
        num_tokens = sum(query_lens)
        width = max((-(-length // block_size) for length in context_lens), default=0)
        host = _HostBatch.zeros(num_tokens, len(sequences), width)
        ends = np.cumsum([0, *query_lens], dtype=np.int32)
        for row, sequence in enumerate(sequences):
            host.write(row, int(ends[row]), sequence, block_size, vocab_size)
        unknown = _unknown_tokens(sequences, ends, previous)
        sampling = [row for row, sequence in enumerate(sequences) if sequence.samples]
        logits_rows = ends[1:][sampling] - 1
        sampled = scored = None
        if any(sequence.scores for sequence in sequences):
            logits_rows, sampled, scored = rows_with_scores(sequences, ends, device)
        arrays = [
            host.input_ids,
            host.positions,
            host.slots,
            ends,
            np.array(context_lens, dtype=np.int32),
            host.block_table.reshape(-1),
            logits_rows,
            *unknown,
        ]
        sizes = [len(array) for array in arrays]
        parts = torch.split(to_device(np.concatenate(arrays), device), sizes)
        ids, positions, slots, cu_q, seq_lens, table, rows, into, taken = parts
        if len(taken):
            known = previous.token_ids.index_select(0, taken).to(torch.int32)
            ids = ids.index_copy(0, into.long(), known)
        metadata = AttentionMetadata(
            cu_q=cu_q,
            seq_lens=seq_lens,
            block_table=table.view(len(sequences), width),
            slots=slots,
            num_decodes=batch.num_decodes,
            max_query_len=max(query_lens, default=0),
            num_tokens=num_tokens,
            query_lens=query_lens,
            context_lens=context_lens,
        )
        return cls(
            input_ids=ids,
            positions=positions,
            logits_rows=rows,
            sampling=tuple(sequences[row] for row in sampling),
            sampled=sampled,
            scored=scored,
            metadata=metadata,
        )


def _unknown_tokens(
    sequences: Sequence[ScheduledSequence], ends: Int32Array, previous: PreviousSample
) -> Int32Array:
    """Returns [2, n]: positions in the batch, and where the previous sample has their tokens."""
    pairs = []
    for sequence, end in zip(sequences, ends[1:].tolist(), strict=True):
        missing = sequence.num_scheduled_tokens - len(sequence.token_ids)
        if not missing:
            continue
        if missing > 1 or sequence.seq_id not in previous.index_of:
            raise ValueError(f"{missing} tokens of sequence {sequence.seq_id} are unknown")
        pairs.append((end - 1, previous.index_of[sequence.seq_id]))
    return np.array(pairs, dtype=np.int32).reshape(-1, 2).T


@dataclass(frozen=True, slots=True)
class _HostBatch:
    input_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    block_table: Int32Array  # [S, width]

    @classmethod
    def zeros(cls, num_tokens: int, num_sequences: int, width: int) -> _HostBatch:
        ids, positions, slots = np.zeros((3, num_tokens), dtype=np.int32)
        return cls(ids, positions, slots, np.zeros((num_sequences, width), dtype=np.int32))

    def write(
        self, row: int, start: int, sequence: ScheduledSequence, block_size: int, vocab_size: int
    ) -> None:
        """Fills in one sequence. Raises ValueError for what would read or write past a tensor's
        end: on CUDA that ends the process."""
        end = start + sequence.num_scheduled_tokens
        num_blocks = -(-sequence.end // block_size)
        if sequence.num_scheduled_tokens < 1 or len(sequence.block_table) < num_blocks:
            raise ValueError(
                f"sequence {sequence.seq_id} has {len(sequence.block_table)} blocks for "
                f"{sequence.end} tokens"
            )
        table = self.block_table[row]
        table[:num_blocks] = sequence.block_table[:num_blocks]
        positions = np.arange(sequence.start, sequence.end, dtype=np.int32)
        self.positions[start:end] = positions
        self.slots[start:end] = table[positions // block_size] * block_size + positions % block_size
        ids = np.array(sequence.token_ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"sequence {sequence.seq_id} has a token outside the vocabulary")
        self.input_ids[start : start + len(ids)] = ids
