"""ForwardBatch: a ScheduledBatch as tensors on the model's device."""

from __future__ import annotations

from collections.abc import Sequence as View
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.batch import DecodeStep, ScheduledBatch
from worker.model.base import AttentionMetadata
from worker.model.sampling.base import PreviousSample
from worker.model.sampling.prompt_scorer import ScoredRows, rows_with_scores
from worker.model.step.rows import SequenceRows, Staging

Int32Array = np.ndarray[Any, np.dtype[np.int32]]

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences, flat, in batch order; int32 throughout."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    logits_rows: Tensor  # [N] tokens whose logits are sampled from, or score a prompt, in order
    num_sampled: int  # sequences that are sampled from
    sampled: Tensor | None  # [num_sampled] their places among the N; None: they are all of them
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
        kept: KeptBatch | None = None,
    ) -> ForwardBatch:
        """Returns the batch, by one transfer to the device that is not waited for.

        `kept` is what it shares with the batches before, for the same sizes and device; its block
        table then holds until the next one is built. Raises ValueError where the schedule
        contradicts itself: a block table that is too short, a token outside the vocabulary, or one
        neither known nor sampled in the step before.
        """
        if kept is None:
            kept = KeptBatch(len(batch), block_size, vocab_size, device)
        return kept.forward_batch(batch, previous)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Which tokens of which sequences: arrays on the host."""

    rows: Int32Array  # [S] of the block tables
    starts: Int32Array  # [S]
    seq_lens: Int32Array  # [S]
    counts: Int32Array  # [S] scheduled tokens
    ends: Int32Array  # [S + 1] where each sequence's tokens begin; the last is T


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Token ids on the host, and where those in flight are found."""

    ids: Int32Array  # [T], 0 where it is not known
    into: Int32Array  # [n] places among the T
    taken: Int32Array  # [n] places in the step before's sample


class KeptBatch:
    """Builds ForwardBatches. Block tables stay from step to step, and of a run of decodes a step
    writes positions, slots, and grown tables."""

    def __init__(
        self,
        max_num_seqs: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_kv_groups: int = 1,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows = SequenceRows(max_num_seqs, device, num_kv_groups)
        self._staging = Staging(device)
        self._device = device
        # For batches of only decodes: counts, and the place of each one's token.
        self._ones = np.ones(max_num_seqs, dtype=np.int32)
        self._from_0 = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._numbers = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._last: DecodeStep | None = None  # what the next two are of
        self._run_rows = _NONE
        self._run_starts = _NONE  # in the run's step 0

    def forget(self, seq_ids: View[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        self._rows.forget(seq_ids)

    def forget_all(self) -> None:
        """Frees the state kept for all sequences, after a step that raised."""
        self._rows.forget_all()
        self._last = None

    def forward_batch(self, batch: ScheduledBatch, previous: PreviousSample) -> ForwardBatch:
        """Returns the batch as ForwardBatch.build does."""
        shape = self._shape(batch)
        step, num_seqs = batch.decodes, len(shape.rows)
        num_decodes = len(step.run) if step is not None else 0
        positions, slots = self._places(shape)
        # If the sample before begins with the same decodes, no place in it has to be named.
        num_same = num_decodes if step is not None and step.follows(previous.decodes) else 0
        arrays = [positions, slots, shape.seq_lens]
        if num_same < num_seqs:
            tokens = self._tokens(batch, shape.ends, previous, num_same)
            arrays += [tokens.ids, tokens.into, tokens.taken]
        query_lens = tuple(shape.counts.tolist()) if batch.others else (1,) * num_seqs
        sampled = scored = None
        num_sampled = num_decodes + sum(s.samples for s in batch.others)
        if batch.others:
            if any(s.scores for s in batch.others):
                logits_rows, sampled, scored = rows_with_scores(
                    batch.sequences, shape.ends, self._device
                )
            else:
                samples = [True] * num_decodes + [s.samples for s in batch.others]
                logits_rows = shape.ends[1:][samples] - 1
            arrays += [shape.ends, logits_rows]
        table_arrays = self._table_arrays(shape.rows)
        parts = self._staging.copy([*arrays, *table_arrays])
        tables = self._block_tables(shape, parts[len(arrays) :])
        if num_same == num_seqs:
            ids = previous.token_ids[:num_same].to(torch.int32)
        else:
            ids = _with_tokens_in_flight(parts[3], previous, num_same, *parts[4:6])
        cu_q, rows = parts[len(arrays) - 2 : len(arrays)]
        if not batch.others:
            cu_q, rows = self._numbers[: num_seqs + 1], self._numbers[:num_seqs]
        return ForwardBatch(
            input_ids=ids,
            positions=parts[0],
            logits_rows=rows,
            num_sampled=num_sampled,
            sampled=sampled,
            scored=scored,
            metadata=AttentionMetadata(
                cu_q=cu_q,
                seq_lens=parts[2],
                block_tables=tables,
                slots=parts[1].view(len(tables), -1),
                num_decodes=batch.num_decodes,
                max_query_len=max(query_lens, default=0),
                num_tokens=len(positions),
                query_lens=query_lens,
                context_lens=tuple(shape.seq_lens.tolist()),
            ),
        )

    def _shape(self, batch: ScheduledBatch) -> _Shape:
        """Raises ValueError for what would read or write past a tensor's end: on CUDA that ends the
        process."""
        rows, starts = self._decodes(batch)
        num_decodes, others = len(rows), batch.others
        if not others:
            counts, ends = self._ones[:num_decodes], self._from_0[: num_decodes + 1]
        else:
            seq_ids = [s.seq_id for s in others]
            tables = [s.block_table for s in others]
            kept = {*seq_ids, *(batch.decodes.run.seq_ids if batch.decodes else ())}
            rows = np.concatenate([rows, self._rows.of(seq_ids, tables, kept)])
            starts = np.concatenate([starts, np.array([s.start for s in others], np.int32)])
            counts = np.ones(len(rows), dtype=np.int32)
            counts[num_decodes:] = [s.num_scheduled_tokens for s in others]
            ends = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(counts, out=ends[1:])
        seq_lens = starts + counts
        is_bad = seq_lens > self._rows.num_blocks[rows] * np.int32(self._block_size)
        if others:
            is_bad |= counts < 1
        if is_bad.any():
            i = int(is_bad.argmax())
            raise ValueError(
                f"sequence {batch.sequences[i].seq_id} has {self._rows.num_blocks[rows[i]]} blocks "
                f"for {seq_lens[i]} tokens, {counts[i]} of them scheduled"
            )
        return _Shape(rows, starts, seq_lens, counts, ends)

    def _decodes(self, batch: ScheduledBatch) -> tuple[Int32Array, Int32Array]:
        """Returns rows and starts of the batch's run of decodes."""
        step, last = batch.decodes, self._last
        self._last = None  # until all is written
        if step is None:
            return _NONE, _NONE
        run = step.run
        if step.follows(last):
            for i in step.grown:
                self._rows.grow(int(self._run_rows[i]))
        else:
            kept = {*run.seq_ids, *(s.seq_id for s in batch.others)}
            self._run_rows = self._rows.of(run.seq_ids, run.block_tables, kept)
            self._run_starts = np.fromiter(run.starts, dtype=np.int32, count=len(run))
        self._last = step
        return self._run_rows, self._run_starts + np.int32(step.number)

    def _places(self, shape: _Shape) -> tuple[Int32Array, Int32Array]:
        """Returns the positions [T] and the slots [G * T] of all tokens."""
        positions, rows = shape.starts, shape.rows
        num_tokens = int(shape.ends[-1])
        if num_tokens > len(rows):
            positions = np.arange(num_tokens, dtype=np.int32)
            positions += np.repeat(shape.starts - shape.ends[:-1], shape.counts)
            rows = np.repeat(rows, shape.counts)
        block, place = np.divmod(positions, np.int32(self._block_size))
        slots = [
            table[rows, block] * np.int32(self._block_size) + place for table in self._rows.table
        ]
        return positions, slots[0] if len(slots) == 1 else np.concatenate(slots)

    def _tokens(
        self, batch: ScheduledBatch, ends: Int32Array, previous: PreviousSample, num_same: int
    ) -> _Tokens:
        """Returns the tokens of all sequences but the first `num_same`. Raises ValueError."""
        ids = np.zeros(int(ends[-1]), dtype=np.int64)
        into: list[int] = []
        taken: list[int] = []
        step, index_of = batch.decodes, previous.index_of
        num_decodes = len(step.run) if step is not None else 0
        if step is not None and not num_same:
            into, taken = self._decode_tokens(step, ids, previous)
        begins = ends[num_decodes:].tolist()
        for sequence, begin, end in zip(batch.others, begins, begins[1:], strict=False):
            missing = sequence.num_scheduled_tokens - len(sequence.token_ids)
            if missing:
                if missing > 1 or sequence.seq_id not in index_of:
                    raise _unknown(missing, sequence.seq_id)
                into.append(end - 1)
                taken.append(index_of[sequence.seq_id])
            ids[begin : end - missing] = sequence.token_ids
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            place = int(((ids < 0) | (ids >= self._vocab_size)).argmax())
            sequence = batch.sequences[int(ends.searchsorted(place, side="right")) - 1]
            raise ValueError(f"sequence {sequence.seq_id} has a token outside the vocabulary")
        return _Tokens(
            ids.astype(np.int32), np.array(into, dtype=np.int32), np.array(taken, dtype=np.int32)
        )

    def _decode_tokens(
        self, step: DecodeStep, ids: NDArray[np.int64], previous: PreviousSample
    ) -> tuple[list[int], list[int]]:
        """Writes the known tokens of a run's step to `ids`; returns the places of the others, and
        where the sample before has them. Raises ValueError."""
        token_ids, seq_ids = step.token_ids(), step.run.seq_ids
        into = list(range(len(seq_ids)))
        if token_ids.count(None) < len(token_ids):
            ids[: len(token_ids)] = [token_id or 0 for token_id in token_ids]
            into = [i for i, token_id in enumerate(token_ids) if token_id is None]
            seq_ids = [seq_ids[i] for i in into]
        taken = list(map(previous.index_of.get, seq_ids, repeat(-1)))
        if -1 in taken:
            raise _unknown(1, seq_ids[taken.index(-1)])
        return into, taken

    def _table_arrays(self, rows: Int32Array) -> list[Int32Array]:
        """Returns what the device needs for the block tables: nothing, where the host shares it."""
        return [] if self._rows.is_shared else [*self._rows.take_written(), rows]

    def _block_tables(self, shape: _Shape, parts: list[Tensor]) -> Tensor:
        """Returns the batch's block tables, [G, S, width]."""
        num_seqs = len(shape.rows)
        width = -(-int(shape.seq_lens.max(initial=0)) // self._block_size)
        is_in_order = np.array_equal(shape.rows, self._from_0[:num_seqs])
        if self._rows.is_shared:
            table = self._rows.table[:, :, :width]
            return torch.from_numpy(table[:, :num_seqs] if is_in_order else table[:, shape.rows])
        cells, values, rows = parts
        there = self._rows.there
        if len(cells):
            there.view(-1).index_copy_(0, cells.long(), values)
        return (there[:, :num_seqs] if is_in_order else there.index_select(1, rows))[:, :, :width]


def _with_tokens_in_flight(
    ids: Tensor, previous: PreviousSample, num_same: int, into: Tensor, taken: Tensor
) -> Tensor:
    """Returns `ids` [T] with the tokens that only the device knows."""
    if num_same:
        ids[:num_same] = previous.token_ids[:num_same]
    if not len(taken):
        return ids
    known = previous.token_ids.index_select(0, taken).to(torch.int32)
    return known if len(taken) == len(ids) else ids.index_copy_(0, into.long(), known)


def _unknown(count: int, seq_id: int) -> ValueError:
    return ValueError(f"{count} tokens of sequence {seq_id} are unknown")
