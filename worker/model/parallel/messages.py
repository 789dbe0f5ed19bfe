"""Messages between rank 0 and the others, and a step as its differences from the one before.

What a rank needs of a step is which tokens of which sequences to compute, and where their keys and
values go. It keeps each sequence's block table, so that a step's message has new blocks only: its
size follows from the step's tokens, not from the lengths of prompts and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.block_hash import BlockHash
from worker.engine.offload import Load, Store
from worker.engine_options import EngineOptions


class StartRank(msgspec.Struct, frozen=True):
    """The first message to a rank, which then joins the group and loads its part of the model."""

    options: EngineOptions
    rank: int
    store_fd: int  # of the file through which the ranks find each other
    peer_fds: dict[int, int]  # of the sockets to the other ranks
    memory_fd: int  # of what all ranks of a mesh share
    log_level: int


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """A ScheduledSequence, without what only the sampler reads."""

    seq_id: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]  # the last one may be missing, as in ScheduledSequence
    num_kept_blocks: int  # of its block table as this rank has it
    new_blocks: tuple[int, ...]  # after them
    samples: bool
    scores: tuple[int, int]  # start and stop of its range


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One step to compute, together with rank 0: every message to a rank but the first."""

    sequences: tuple[SequenceStep, ...]
    finished_seq_ids: tuple[int, ...]
    transfers: tuple[tuple[bool, int, int], ...]  # is a Store, slot, block


class RankStarted(msgspec.Struct, frozen=True, tag="started"):
    """The rank has imported its libraries and is about to join the group."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank has its part of the model and waits for steps."""


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot load its part, or compute a step, and ends."""

    message: str
    by_settings: bool  # another setting or model would help


class RankLog(msgspec.Struct, frozen=True, tag="log"):
    """A record of the rank's log, for rank 0 to write."""

    logger: str
    level: int
    message: str


FromRank = RankStarted | RankLoaded | RankFailed | RankLog

encode = msgspec.msgpack.Encoder().encode
_start: msgspec.msgpack.Decoder[StartRank] = msgspec.msgpack.Decoder(StartRank)
_step: msgspec.msgpack.Decoder[RankStep] = msgspec.msgpack.Decoder(RankStep)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
decode_start = _start.decode
decode_step = _step.decode
decode_from_rank = _from_rank.decode


class StepEncoder:
    """Turns batches into RankSteps. Every step that it returns must reach all ranks, in order."""

    def __init__(self) -> None:
        # The list itself: a sequence that gives its blocks back gets a new one, and a table only
        # ever grows.
        self._tables: dict[int, tuple[Sequence[int], int]] = {}

    def encode(self, batch: ScheduledBatch) -> RankStep:
        """Returns the new parts of the batch."""
        for seq_id in batch.finished_seq_ids:
            self._tables.pop(seq_id, None)
        sequences = tuple(map(self._encode, batch.sequences))
        transfers = tuple(
            (True, item.slot, item.block_id)
            if isinstance(item, Store)
            else (False, cast(int, item.source), item.block_id)  # with a disk there are no ranks
            for item in batch.transfers
        )
        return RankStep(sequences, batch.finished_seq_ids, transfers)

    def _encode(self, sequence: ScheduledSequence) -> SequenceStep:
        table = sequence.block_table
        known, num_sent = self._tables.get(sequence.seq_id, (None, 0))
        kept = num_sent if known is table else 0
        self._tables[sequence.seq_id] = (table, len(table))
        return SequenceStep(
            seq_id=sequence.seq_id,
            start=sequence.start,
            num_tokens=sequence.num_scheduled_tokens,
            token_ids=tuple(sequence.token_ids),
            num_kept_blocks=kept,
            new_blocks=tuple(table[kept:]),
            samples=sequence.samples,
            scores=(sequence.scores.start, sequence.scores.stop),
        )


_NO_PARAMS = SamplingParams()
_NO_KEY = BlockHash(b"")  # only rank 0 finds copies


class StepDecoder:
    """Turns RankSteps back into batches, as far as a rank that does not sample needs them."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def decode(self, step: RankStep) -> ScheduledBatch:
        """Returns the batch. Parameters and outputs are not rank 0's, of the prompt only its length
        up to the last scored token is, and an unknown token is 0."""
        for seq_id in step.finished_seq_ids:
            self._tables.pop(seq_id, None)
        transfers = tuple(
            Store(_NO_KEY, block_id, slot) if is_store else Load(slot, block_id)
            for is_store, slot, block_id in step.transfers
        )
        sequences = tuple(map(self._decode, step.sequences))
        return ScheduledBatch(sequences, step.finished_seq_ids, transfers=transfers)

    def _decode(self, step: SequenceStep) -> ScheduledSequence:
        table = self._tables.get(step.seq_id)
        if table is None or step.num_kept_blocks < len(table):
            # Another list: a KeptBatch knows a table by its identity.
            kept = [] if table is None else table[: step.num_kept_blocks]
            table = self._tables[step.seq_id] = kept
        table.extend(step.new_blocks)
        return ScheduledSequence(
            seq_id=step.seq_id,
            start=step.start,
            num_scheduled_tokens=step.num_tokens,
            token_ids=step.token_ids + (0,) * (step.num_tokens - len(step.token_ids)),
            block_table=table,
            samples=step.samples,
            params=_NO_PARAMS,
            prompt_token_ids=range(step.scores[1]),
            output_token_ids=(),
            scores=range(*step.scores),
        )
