"""ScheduledBatch: the sequences and tokens of one step, as plain data."""

from __future__ import annotations

from collections.abc import Sequence as View
from functools import cached_property
from typing import NamedTuple, Protocol

from shared.messages import SamplingParams
from worker.engine.offload import Transfers


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: compute tokens [start, start + num_scheduled_tokens).

    `token_ids` are the known ones among them. With lookahead the last one may not be known on the
    host yet: then `len(token_ids) == num_scheduled_tokens - 1` and the runner takes the token that
    it sampled for this sequence in the step before.

    `block_table` covers at least `start + num_scheduled_tokens` places. It only ever grows: other
    content comes in another list. When `samples`, the runner samples one token from the last
    position's logits; that token's absolute position is `start + num_scheduled_tokens`, which (with
    the seed) fixes its noise.

    `scores` are positions of prompt tokens whose log probabilities are wanted as well: that of the
    token at position p is among the logits of position p - 1, which this step computes.

    `prompt_token_ids` and `output_token_ids` are read-only views for penalties; with lookahead the
    outputs may lack the token in flight.

    A named tuple, because steps make many of them.
    """

    seq_id: int  # unique in the engine's life; never reused
    start: int
    num_scheduled_tokens: int
    token_ids: View[int]
    block_table: View[int]
    samples: bool
    params: SamplingParams
    prompt_token_ids: View[int]
    output_token_ids: View[int]
    scores: range = range(0)
    tenant: str = ""

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled_tokens

    @property
    def output_index(self) -> int:
        """Index among the outputs of the token that this step samples, tokens in flight counted."""
        return self.end - len(self.prompt_token_ids)


class DecodingSequence(Protocol):
    """What a run of decodes reads of a sequence; the lists only ever grow."""

    @property
    def seq_id(self) -> int: ...
    @property
    def token_ids(self) -> View[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_token_ids(self) -> View[int]: ...
    @property
    def output_token_ids(self) -> View[int]: ...
    @property
    def tenant(self) -> str: ...


class DecodeRun:
    """The decodes of consecutive steps that have the same ones, in the same order.

    In step n of the run, sequence i computes the one token at position `starts[i] + n` and samples.
    So a step carries n and the sequences whose block tables have grown. A sequence that leaves,
    joins or loses its blocks starts a new run.
    """

    __slots__ = ("block_tables", "first_token_ids", "seq_ids", "sequences", "starts")

    def __init__(
        self,
        sequences: tuple[DecodingSequence, ...],
        starts: list[int],
        block_tables: list[list[int]],
        first_token_ids: list[int | None],
    ) -> None:
        """`first_token_ids` are step 0's; None: it is not known on the host yet."""
        self.sequences = sequences
        self.seq_ids = [s.seq_id for s in sequences]
        self.starts = starts
        self.block_tables = block_tables
        self.first_token_ids = first_token_ids

    def __len__(self) -> int:
        return len(self.sequences)


class DecodeStep(NamedTuple):
    """Step `number` of a run."""

    run: DecodeRun
    number: int
    grown: tuple[int, ...] = ()  # whose block tables have grown since the step before, from step 1
    is_ahead: bool = False  # from step 1: the tokens are those that the step before samples

    def follows(self, other: DecodeStep | None) -> bool:
        """Returns whether `other` is the step before it in the same run."""
        return other is not None and other.run is self.run and other.number == self.number - 1

    def token_ids(self) -> View[int | None]:
        """Returns the token that each sequence computes; None: it is not known on the host yet."""
        run, number = self.run, self.number
        if number == 0:
            return run.first_token_ids
        if self.is_ahead:
            return (None,) * len(run)
        return [
            s.token_ids[start + number] for s, start in zip(run.sequences, run.starts, strict=True)
        ]

    def scheduled(self) -> list[ScheduledSequence]:
        """Returns the step sequence by sequence."""
        run = self.run
        return [
            ScheduledSequence(
                sequence.seq_id,
                start + self.number,
                1,
                () if token_id is None else (token_id,),
                table,
                True,
                sequence.params,
                sequence.prompt_token_ids,
                sequence.output_token_ids,
                tenant=sequence.tenant,
            )
            for sequence, start, table, token_id in zip(
                run.sequences, run.starts, run.block_tables, self.token_ids(), strict=True
            )
        ]


class ScheduledBatch:
    """Decodes (one scheduled token, sampled) come first, then chunks, each in schedule order.

    `finished_seq_ids` are gone since the last batch: the runner forgets their state. After a failed
    launch they may name a sequence again, or one that the runner never saw.

    `transfers` are copies to make before anything is computed, see worker.engine.offload. A batch
    may have them and no sequence; a chunk may be the last token of a prompt that is loaded.

    `sequences` are all of them. A runner that keeps state for a run reads `decodes` and `others`
    instead: if `decodes` is None, all are among the others.
    """

    def __init__(
        self,
        others: tuple[ScheduledSequence, ...],
        finished_seq_ids: tuple[int, ...] = (),
        *,
        decodes: DecodeStep | None = None,
        transfers: Transfers = (),
    ) -> None:
        self.others = others
        self.finished_seq_ids = finished_seq_ids
        self.decodes = decodes
        self.transfers = transfers

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not self.transfers and not len(self)

    def __len__(self) -> int:
        return len(self.others) + (len(self.decodes.run) if self.decodes is not None else 0)

    @cached_property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        step = self.decodes
        if step is None:
            return self.others
        return (*step.scheduled(), *self.others)

    @cached_property
    def num_tokens(self) -> int:
        num_decodes = len(self.decodes.run) if self.decodes is not None else 0
        return num_decodes + sum(s.num_scheduled_tokens for s in self.others)

    @cached_property
    def num_decodes(self) -> int:
        """Leading sequences with exactly one scheduled token that samples."""
        if self.decodes is not None:
            return len(self.decodes.run)  # all of them
        count = 0
        for sequence in self.others:
            if sequence.num_scheduled_tokens != 1 or not sequence.samples:
                break
            count += 1
        return count
