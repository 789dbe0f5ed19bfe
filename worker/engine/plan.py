"""Schedule: one step's plan, the scheduler's side of a ScheduledBatch.

Most sequences of most steps were decodes in the previous step too. They are planned as a
`Decoding`, which continues from step to step and computes the constant parts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as View
from functools import cached_property
from typing import NamedTuple

from shared.messages import PromptLogprob
from worker.engine.batch import DecodeRun, DecodeStep, ScheduledBatch
from worker.engine.block_manager import BlockManager
from worker.engine.errors import IntegrityError
from worker.engine.outputs import plain_outputs
from worker.engine.ports import StepResult
from worker.engine.request import EngineOutput
from worker.engine.sequence import Sequence, SequenceStatus


class PlannedSequence(NamedTuple):
    """The scheduler's side of a ScheduledSequence."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_preemptions: int  # when planned: a later value means that this work was discarded
    scores: range = range(0)  # as ScheduledSequence.scores
    num_loaded: int = 0  # tokens at its beginning that are copied and not computed

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.samples

    def new_scores(self, result: StepResult) -> tuple[PromptLogprob, ...]:
        """Returns the log probabilities that an uncommitted step adds to its prompt.

        The token at position p is scored by the logits of position p - 1. A prompt that lost its
        blocks is computed again; repeated log probabilities are dropped here. Raises IntegrityError
        when some are missing before the new ones.
        """
        sequence = self.sequence
        num_known = sequence.num_scored_tokens - self.scores.start
        if sequence.is_finished or num_known >= len(self.scores):
            return ()
        if num_known < 0:
            raise IntegrityError("a prompt's log probabilities have a gap")
        return tuple(result.prompt_logprobs[sequence.seq_id][num_known:])


class Decoding:
    """The scheduler's side of a DecodeRun, as of its latest step."""

    def __init__(self, sequences: View[Sequence], num_departed: int, capacity_tokens: int) -> None:
        """`num_departed`: see Scheduler; `capacity_tokens`: of one sequence. The sequences do not
        count step 0 as scheduled yet."""
        self.sequences = tuple(sequences)
        self.num_departed = num_departed
        starts = [s.num_computed_tokens + s.num_scheduled_tokens for s in sequences]
        self.run = DecodeRun(
            self.sequences,
            starts,
            [s.block_table for s in sequences],
            [None if s.in_flight else s.token_ids[-1] for s in sequences],
        )
        self.number = 0
        self.num_preemptions = [s.num_preemptions for s in sequences]
        # Further steps in which no sequence has its last token in flight, nor outgrows the cache:
        # in step 0 the last known token is at `start`, and one is sampled after it.
        self.num_left = max(
            0,
            min(
                min(s.max_num_tokens, capacity_tokens) - start
                for s, start in zip(sequences, starts, strict=True)
            )
            - 2,
        )
        self._num_without_end = self.num_left  # of steps that sample no sequence's last token
        # Whose prompt's last token may be in step 0: the others are in the engine's counts.
        self.fresh = [s for s in sequences if s.first_token_s is None]
        self._by_turn: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def members(self) -> frozenset[Sequence]:
        return frozenset(self.sequences)

    @cached_property
    def structured(self) -> tuple[Sequence, ...]:
        """Those whose outputs are kept to a grammar."""
        return tuple(s for s in self.sequences if s.params.grammar is not None)

    @cached_property
    def wanting_logprobs(self) -> frozenset[int]:
        return frozenset(s.seq_id for s in self.sequences if s.params.logprobs is not None)

    @cached_property
    def _constant_fields(self) -> tuple[list[str], list[int]]:
        """The fields of each sequence's outputs that are the same in all steps."""
        return (
            [s.request_id for s in self.sequences],
            [s.num_cached_tokens for s in self.sequences],
        )

    @cached_property
    def _have_own_ends(self) -> bool:
        return any(s.params.stop_token_ids for s in self.sequences)

    def outputs(
        self, number: int, token_ids: View[int], eos_token_ids: Set[int]
    ) -> Iterator[EngineOutput] | None:
        """Returns the outputs of step `number`, which gave each sequence one of `token_ids`; None
        if one of them may hold more than its token (an end, log probabilities)."""
        if (
            number >= self._num_without_end
            or self.wanting_logprobs
            or self._have_own_ends
            or not eos_token_ids.isdisjoint(token_ids)
            or any(s.first_token_s is None for s in self.fresh)
        ):
            return None
        request_ids, num_cached_tokens = self._constant_fields
        return plain_outputs(request_ids, token_ids, num_cached_tokens)

    def next_step(self, blocks: BlockManager) -> DecodeStep:
        """Continues by one step. The caller has made sure that the blocks suffice."""
        self.number += 1
        self.num_left -= 1
        turns = self._turns(blocks.block_size)[self.number % blocks.block_size]
        grown = []
        for i in turns:
            sequence = self.sequences[i]
            num_blocks = len(sequence.block_table)
            allocated = blocks.allocate(sequence, self.run.starts[i] + self.number + 1)
            assert allocated
            if len(sequence.block_table) > num_blocks:
                grown.append(i)
        # All were in the step before, so all have a token in flight or none has.
        return DecodeStep(self.run, self.number, tuple(grown), self.sequences[0].in_flight > 0)

    def _turns(self, block_size: int) -> list[list[int]]:
        """Returns the sequences whose place is the first of a block, by step modulo block size."""
        if not self._by_turn:
            self._by_turn = [[] for _ in range(block_size)]
            for i, start in enumerate(self.run.starts):
                self._by_turn[-start % block_size].append(i)
        return self._by_turn

    def planned(self, number: int, put_off: Set[Sequence]) -> list[PlannedSequence]:
        """Returns step `number` of the run, sequence by sequence."""
        return [
            PlannedSequence(sequence, start + number, 1, True, num_preemptions)
            for sequence, start, num_preemptions in zip(
                self.sequences, self.run.starts, self.num_preemptions, strict=True
            )
            if sequence not in put_off
        ]

    def commit(
        self,
        token_ids: Mapping[int, int],
        blocks: BlockManager,
        grown: list[Sequence],
        put_off: Set[Sequence],
    ) -> None:
        """Does as Schedule.commit. Two hundred sequences a step: it calls nothing for each."""
        block_size, turns, finished = blocks.block_size, blocks.turns, SequenceStatus.FINISHED
        for sequence, num_preemptions in zip(self.sequences, self.num_preemptions, strict=True):
            if put_off and sequence in put_off:
                continue
            sequence.in_flight -= 1
            if sequence.status is finished:
                continue
            token_id = token_ids[sequence.seq_id]
            sequence.token_ids.append(token_id)
            sequence.output_token_ids.append(token_id)
            grown.append(sequence)
            if sequence.num_preemptions == num_preemptions:
                num_computed = sequence.num_computed_tokens + 1
                sequence.num_computed_tokens = num_computed
                sequence.num_scheduled_tokens -= 1
                if num_computed % block_size in turns:
                    blocks.advance(sequence, num_computed)


class Draft:
    """A step that is being planned."""

    def __init__(self, left: int, left_to_load: int) -> None:
        self.left = left  # of the token budget
        self.left_to_load = left_to_load  # tokens that the offload tier may give
        self.decoding: list[Sequence] = []  # besides those of a run that continues
        self.chunks: list[PlannedSequence] = []
        self.outgrown: list[Sequence] = []


class Schedule:
    """One step's plan. `outgrown` need more blocks than the pool has and must end.

    `decoding` has the batch's decodes, `chunks` are all others.
    """

    def __init__(
        self,
        batch: ScheduledBatch,
        decoding: Decoding | None = None,
        chunks: tuple[PlannedSequence, ...] = (),
        outgrown: tuple[Sequence, ...] = (),
    ) -> None:
        self.batch = batch
        self.decoding = decoding
        self.chunks = chunks
        self.outgrown = outgrown
        self._put_off: set[Sequence] = set()  # decodes

    @property
    def planned(self) -> tuple[PlannedSequence, ...]:
        """Returns the batch in its order, without the sequences that were put off."""
        step = self.batch.decodes
        if self.decoding is None or step is None:
            return self.chunks
        return (*self.decoding.planned(step.number, self._put_off), *self.chunks)

    def put_off(self, sequences: Set[Sequence]) -> None:
        """Removes the sequences' last token from the step, so that none is sampled after it. The
        tokens before it in a chunk stay."""
        for item in self.planned:
            sequence = item.sequence
            if sequence not in sequences or not item.samples:
                continue
            sequence.in_flight -= 1
            if not sequence.is_finished and item.num_preemptions == sequence.num_preemptions:
                sequence.num_scheduled_tokens -= 1
            if item.is_decode:
                self._put_off.add(sequence)
        self.chunks = tuple(
            item._replace(num_tokens=item.num_tokens - 1, samples=False)
            if item.samples and item.sequence in sequences
            else item
            for item in self.chunks
        )

    @property
    def has_loaded(self) -> bool:
        """Whether tokens were copied: its time is not that of the computed ones."""
        return any(item.num_loaded for item in self.chunks)

    @property
    def fresh(self) -> View[Sequence]:
        """Decodes that were in no step before, and some that were."""
        step = self.batch.decodes
        return self.decoding.fresh if self.decoding is not None and step and not step.number else ()

    @property
    def structured(self) -> tuple[Sequence, ...]:
        """Those that are sampled from by a grammar."""
        decodes = self.decoding.structured if self.decoding is not None else ()
        if not self.chunks:
            return decodes
        chunks = (i.sequence for i in self.chunks if i.samples)
        return (*decodes, *(s for s in chunks if s.params.grammar is not None))

    def score_outputs(self, result: StepResult) -> Iterator[EngineOutput]:
        """Yields the new log probabilities of prompts. Scores are taken at the commit of the step
        that computed them, like tokens: a step that failed gave none."""
        for item in self.chunks:
            if scores := item.new_scores(result):
                yield EngineOutput(item.sequence.request_id, (), prompt_logprobs=scores)

    def commit(self, token_ids: Mapping[int, int], blocks: BlockManager) -> list[Sequence]:
        """Takes the step's tokens in; returns the sequences that grew, in batch order.

        Finished sequences are skipped: tokens sampled for them after their end are dropped.
        """
        grown: list[Sequence] = []
        if self.decoding is not None:
            self.decoding.commit(token_ids, blocks, grown, self._put_off)
        for item in self.chunks:
            sequence = item.sequence
            if item.samples:
                sequence.in_flight -= 1
            if sequence.is_finished:
                continue
            if item.samples:
                sequence.append(token_ids[sequence.seq_id])
                grown.append(sequence)
            sequence.num_scored_tokens = max(sequence.num_scored_tokens, item.scores.stop)
            if item.num_preemptions == sequence.num_preemptions:
                sequence.num_computed_tokens += item.num_tokens
                sequence.num_scheduled_tokens -= item.num_tokens
                if item.num_loaded and not item.num_preemptions:  # as an admission's prefix hit
                    num_cached = sequence.num_cached_tokens + item.num_loaded
                    sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
                blocks.advance(sequence, sequence.num_computed_tokens)
        return grown

    def undo(self) -> None:
        """Takes the step back."""
        for item in self.planned:
            sequence = item.sequence
            if item.samples:
                sequence.in_flight -= 1
            if not sequence.is_finished and item.num_preemptions == sequence.num_preemptions:
                sequence.num_scheduled_tokens -= item.num_tokens
