"""Messages between rank 0 and the others, and a step as its differences from the one before.

What a rank needs of a step is which tokens of which sequences to compute, and where their keys and
values go. It keeps each sequence's block table, so that a step's message has new blocks only: its
size follows from the step's tokens, not from the lengths of prompts and outputs. It keeps a run of
decodes too: a step that continues one is sent as the blocks that were added, and as the tokens of
the step before if the device does not share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from shared.messages import SamplingParams
from worker.engine.batch import DecodeRun, DecodeStep, ScheduledBatch, ScheduledSequence
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

    sequences: tuple[SequenceStep, ...]  # those of a run that begins come first
    finished_seq_ids: tuple[int, ...]
    transfers: tuple[tuple[bool, int, int], ...]  # is a Store, slot, block
    num_in_run: int  # sequences of a run that begins
    # Where the run of the step before continues: places in it of sequences that have new blocks.
    grown: tuple[tuple[int, tuple[int, ...]], ...] | None
    sampled: tuple[int, ...]  # by the step before, for that run; empty: the host lacks them


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
        self._last: DecodeStep | None = None  # of the step before

    def encode(self, batch: ScheduledBatch) -> RankStep:
        """Returns the new parts of the batch."""
        for seq_id in batch.finished_seq_ids:
            self._tables.pop(seq_id, None)
        sequences, num_in_run = batch.others, 0
        grown, sampled = None, cast("Sequence[int]", ())
        decodes, last = batch.decodes, self._last
        if len(batch):  # a step without sequences does not end a run
            self._last = decodes
        if decodes is not None and decodes.follows(last):
            grown = self._grown(decodes)
            if not decodes.is_ahead:
                sampled = cast("Sequence[int]", decodes.token_ids())  # the host knows them
        elif decodes is not None:
            sequences, num_in_run = batch.sequences, len(decodes.run)
        transfers = tuple(
            (True, item.slot, item.block_id)
            if isinstance(item, Store)
            else (False, cast(int, item.source), item.block_id)  # with a disk there are no ranks
            for item in batch.transfers
        )
        return RankStep(
            tuple(map(self._encode, sequences)),
            batch.finished_seq_ids,
            transfers,
            num_in_run,
            grown,
            tuple(sampled),
        )

    def _grown(self, step: DecodeStep) -> tuple[tuple[int, tuple[int, ...]], ...]:
        run = step.run
        return tuple(
            (place, self._new_blocks(run.seq_ids[place], run.block_tables[place])[1])
            for place in step.grown
        )

    def _encode(self, sequence: ScheduledSequence) -> SequenceStep:
        num_kept, new_blocks = self._new_blocks(sequence.seq_id, sequence.block_table)
        return SequenceStep(
            seq_id=sequence.seq_id,
            start=sequence.start,
            num_tokens=sequence.num_scheduled_tokens,
            token_ids=tuple(sequence.token_ids),
            num_kept_blocks=num_kept,
            new_blocks=new_blocks,
            samples=sequence.samples,
            scores=(sequence.scores.start, sequence.scores.stop),
        )

    def _new_blocks(self, seq_id: int, table: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Returns how many blocks of a table the ranks have, and the others, which they get."""
        known, num_sent = self._tables.get(seq_id, (None, 0))
        num_kept = num_sent if known is table else 0
        self._tables[seq_id] = (table, len(table))
        return num_kept, tuple(table[num_kept:])


_NO_PARAMS = SamplingParams()
_NO_KEY = BlockHash(b"")  # only rank 0 finds copies


class RankSequence:
    """A sequence at a rank that does not sample: its blocks, and as a DecodingSequence its id."""

    __slots__ = ("block_table", "seq_id")
    token_ids: Sequence[int] = ()
    params = _NO_PARAMS
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    tenant = ""

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.block_table: list[int] = []

    def keep(self, num_blocks: int, new_blocks: Sequence[int]) -> None:
        """Keeps that many blocks, and adds the new ones."""
        if num_blocks < len(self.block_table):
            # Another list: a KeptBatch knows a table by its identity.
            self.block_table = self.block_table[:num_blocks]
        self.block_table.extend(new_blocks)


class StepDecoder:
    """Turns RankSteps back into batches, as far as a rank that does not sample needs them."""

    def __init__(self) -> None:
        self._sequences: dict[int, RankSequence] = {}
        self._last: DecodeStep | None = None  # of the step before

    def decode(self, step: RankStep) -> ScheduledBatch:
        """Returns the batch. Parameters and outputs are not rank 0's, of the prompt only its length
        up to the last scored token is, and an unknown token is 0. A run that continues has its
        tokens in `step.sampled`."""
        for seq_id in step.finished_seq_ids:
            self._sequences.pop(seq_id, None)
        transfers = tuple(
            Store(_NO_KEY, block_id, slot) if is_store else Load(slot, block_id)
            for is_store, slot, block_id in step.transfers
        )
        decodes = None
        if step.grown is not None:
            decodes = self._continued(step.grown)
        elif step.num_in_run:
            decodes = DecodeStep(self._run(step.sequences[: step.num_in_run]), 0)
        others = tuple(map(self._other, step.sequences[step.num_in_run :]))
        if others or decodes is not None:
            self._last = decodes
        return ScheduledBatch(others, step.finished_seq_ids, decodes=decodes, transfers=transfers)

    def _run(self, steps: Sequence[SequenceStep]) -> DecodeRun:
        sequences = tuple(map(self._sequence, steps))
        return DecodeRun(
            sequences,
            [step.start for step in steps],
            [sequence.block_table for sequence in sequences],
            [step.token_ids[0] if step.token_ids else 0 for step in steps],
        )

    def _continued(self, grown: Sequence[tuple[int, Sequence[int]]]) -> DecodeStep:
        last = self._last
        assert last is not None, "a run that continues was sent before"
        for place, new_blocks in grown:
            last.run.block_tables[place].extend(new_blocks)
        places = tuple(place for place, _ in grown)
        return DecodeStep(last.run, last.number + 1, places, is_ahead=True)

    def _sequence(self, step: SequenceStep) -> RankSequence:
        sequence = self._sequences.get(step.seq_id)
        if sequence is None:
            sequence = self._sequences[step.seq_id] = RankSequence(step.seq_id)
        sequence.keep(step.num_kept_blocks, step.new_blocks)
        return sequence

    def _other(self, step: SequenceStep) -> ScheduledSequence:
        return ScheduledSequence(
            seq_id=step.seq_id,
            start=step.start,
            num_scheduled_tokens=step.num_tokens,
            token_ids=step.token_ids + (0,) * (step.num_tokens - len(step.token_ids)),
            block_table=self._sequence(step).block_table,
            samples=step.samples,
            params=_NO_PARAMS,
            prompt_token_ids=range(step.scores[1]),
            output_token_ids=(),
            scores=range(*step.scores),
        )
