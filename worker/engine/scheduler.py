"""Scheduler: which tokens the next step computes.

One rule, no phases: every sequence's computed tokens catch up with its known ones, inside one token
budget. A decode is a sequence that misses one token, a prefill one that misses more; both share a
batch.

    1. Running sequences that miss one token: a decode never waits for another sequence's prefill.
    2. Running sequences that miss more, as far as the budget goes.
    3. Waiting sequences, while there are budget, slots and blocks: by their share of the slots
       (running_slots.py), then by rank. When slots or blocks are taken, sequences of lower classes
       are preempted first; when all slots are, perhaps one of a tenant or job with many.

A newcomer takes budget that every running sequence has left over, so there are never more running
than the budget has tokens, and every decode gets its token in every step. Only while `most_tokens`
bounds a step, after one that ran out of memory, is there less: prompts are cut first, and if not
even all decodes fit, the last claims are preempted.

Blocks: a sequence is admitted when blocks for all its known tokens are free, and gets them at once;
then it grows by decoding only. For layers with a window it gets as many as it can hold at once,
and as its prompt is computed, others for those that no query reaches any more. When a decode finds
no free block, the running sequence of the largest rank is preempted, of the tenant with the most
slots if there are several: it gives up its blocks, keeps its tokens and waits to be computed again,
mostly out of the prefix cache. An admission leaves a row of blocks for each running
sequence, or the newcomer would be preempted in the next step; one whose tenant holds fewer slots
would not, and leaves none.

`schedule` may allocate; only `commit` advances `num_computed_tokens` and publishes blocks, so a
failed step publishes nothing. Tokens whose blocks the offload tier has are planned like others, and
copied instead of computed: in a step at most as many as may be computed, so that decodes wait no
longer for them than for a prompt. A schedule may be made while the previous step is still in flight
(lookahead): tokens sampled there but not known yet count as `in_flight`. Blocks that
a sequence gives up with a step in flight may be reused at once: steps execute in launch order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as View

from worker.engine.batch import DecodeStep, ScheduledBatch, ScheduledSequence
from worker.engine.block_manager import BlockManager
from worker.engine.config import EngineConfig
from worker.engine.plan import Decoding, Draft, PlannedSequence, Schedule
from worker.engine.queue import SequenceQueue, make_policy
from worker.engine.running_slots import SlotShares
from worker.engine.sequence import QUEUED_STATUSES, Sequence, SequenceStatus


class Scheduler:
    """Owns the queues and the BlockManager. Raises ValueError for an unknown policy."""

    def __init__(self, config: EngineConfig) -> None:
        policy = make_policy(config.policy)
        self.blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching,
            windows=config.windows,
            held=config.window_group_blocks,
            num_offload_blocks=config.num_offload_blocks,
            offload_stores_per_step=config.offload_stores_per_step,
        )
        self._offload = self.blocks.offload
        self._held_blocks = config.held_blocks
        self._capacity_tokens = config.sequence_capacity_tokens
        self.waiting = SequenceQueue(policy)
        self.running = SequenceQueue(policy)
        self._shares = SlotShares(policy)
        self._shares_changed = False  # since the last check for a sequence to preempt
        self._claims: list[Sequence] = []  # of this step; the last gives up its blocks first
        self._rank = policy.rank
        self._decoding: Decoding | None = None  # the decodes of the last schedule
        self._num_departed = 0  # sequences that stopped running, and steps that were undone
        self.num_preemptions = 0
        self.gave_way: list[Sequence] = []  # to a higher class; the engine clears it
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._has_prefix_cache = config.prefix_caching
        self._budget = config.max_num_batched_tokens
        self._num_slots = config.max_num_seqs
        self._launched_seq_ids: set[int] = set()  # live ones that the runner knows of
        self._gone_seq_ids: list[int] = []  # and those that it still has to forget

    @property
    def _num_spare(self) -> int:
        """Blocks that all running sequences take when they grow."""
        return len(self.running) * self.blocks.row_blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        self._shares_changed = True

    def finish(self, sequence: Sequence) -> None:
        """Ends it in any state and frees its blocks; for a finished one nothing happens."""
        if sequence.is_finished:
            return
        if sequence.status in QUEUED_STATUSES:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.blocks.release(sequence)
        if sequence.seq_id in self._launched_seq_ids:
            self._launched_seq_ids.remove(sequence.seq_id)
            self._gone_seq_ids.append(sequence.seq_id)

    def schedule(
        self,
        prompt_tokens: Callable[[int], int] | None = None,
        *,
        most_tokens: int | None = None,
        only: Sequence | None = None,
    ) -> Schedule:
        """Plans the next step; an empty plan means that no step can be launched now.

        Beside n decodes at most `prompt_tokens(n)` others are planned, and `most_tokens` in all.
        With `only`, which must be running, nothing else is planned.
        """
        if only is None:
            self._share_slots()
        left = self._budget if most_tokens is None else min(self._budget, most_tokens)
        draft = Draft(left, max(self._budget, self.blocks.block_size))
        going_on = self._going_on(draft.left) if only is None else None
        decodes, prefills = going_on or self._candidates(only)
        if len(decodes) > draft.left:
            decodes = self._keep(decodes, draft.left)
        if decodes and prompt_tokens is not None:
            draft.left = min(draft.left, len(decodes) + prompt_tokens(len(decodes)))
        step = None
        if going_on is not None:
            assert self._decoding is not None
            step = self._decoding.next_step(self.blocks)
            draft.left -= len(decodes)
        else:
            self._plan_decodes(decodes, draft)
        for sequence in prefills:
            self._plan_running(sequence, draft)
        if only is None:
            self._admit(draft)
        if step is None:
            step = self._begin(draft.decoding)
        elif draft.decoding:
            step = self._begin([*decodes, *draft.decoding])
        return Schedule(
            self._batch_of(step, draft.chunks),
            self._decoding,
            tuple(draft.chunks),
            tuple(draft.outgrown),
        )

    def _candidates(self, only: Sequence | None) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the running sequences that miss one token, and those that miss more."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._by_claim() if only is None else (only,):
            # As num_missing_tokens and is_complete_in_flight, which would be calls.
            num_known = len(sequence.token_ids) + sequence.in_flight
            num_missing = num_known - sequence.num_computed_tokens - sequence.num_scheduled_tokens
            if num_missing < 1 or sequence.is_held:
                continue
            if num_known >= sequence.max_num_tokens and sequence.is_complete_in_flight:
                continue
            (decodes if num_missing == 1 else prefills).append(sequence)
        return decodes, prefills

    def _keep(self, decodes: View[Sequence], most: int) -> list[Sequence]:
        """Returns `most` of more decodes, in their order, and preempts the others, from the last
        claim up: those that stay get a token in every step."""
        by_claim = sorted(decodes, key=self._shares.claim)
        for sequence in reversed(by_claim[most:]):
            self._preempt(sequence)
        return [s for s in decodes if s.status is SequenceStatus.RUNNING]

    def _going_on(self, left: int) -> tuple[View[Sequence], View[Sequence]] | None:
        """Returns what `_candidates` would, where the decodes are those of the last schedule again,
        and have blocks."""
        decoding = self._decoding
        if (
            decoding is None
            or decoding.num_departed != self._num_departed
            or not decoding.num_left
            or len(decoding) > left
            or self.blocks.num_available < self._num_spare
        ):
            return None
        prefills: list[Sequence] = []
        if len(self.running) > len(decoding):
            members = decoding.members
            for sequence in self._by_claim():
                if sequence in members or sequence.is_complete_in_flight or sequence.is_held:
                    continue
                num_missing = sequence.num_missing_tokens
                if num_missing == 1:
                    return None
                if num_missing > 1:
                    prefills.append(sequence)
        return decoding.sequences, prefills

    def _plan_decodes(self, decodes: View[Sequence], draft: Draft) -> None:
        block_size, row_blocks = self.blocks.block_size, self.blocks.row_blocks
        running = SequenceStatus.RUNNING
        for sequence in decodes:
            if (
                draft.left
                and sequence.status is running
                and (sequence.num_computed_tokens + sequence.num_scheduled_tokens) * row_blocks
                < len(sequence.block_table) * block_size
                and sequence.params.max_tokens
            ):  # the usual case: no decision is needed
                draft.decoding.append(sequence)
                draft.left -= 1
            else:
                self._plan_running(sequence, draft)

    def _plan_running(self, sequence: Sequence, draft: Draft) -> None:
        """Plans the missing tokens of a running sequence, as far as budget and blocks allow."""
        if not draft.left or sequence.status is not SequenceStatus.RUNNING:
            return  # preempted for one before it
        end = min(sequence.num_virtual_tokens, sequence.next_position + draft.left)
        if self._held_blocks(end) > self.blocks.num_blocks:
            # Its token in flight may still turn out to be a stop: judge it when it is known.
            if sequence.in_flight == 0:
                draft.outgrown.append(sequence)
        elif self._make_room(sequence, end):
            self._plan(sequence, end, draft)

    def _begin(self, sequences: list[Sequence]) -> DecodeStep | None:
        """Starts a run of decodes; returns None without sequences."""
        if not sequences:
            self._decoding = None
            return None
        self._decoding = Decoding(sequences, self._num_departed, self._capacity_tokens)
        self._launched_seq_ids.update(self._decoding.run.seq_ids)
        return DecodeStep(self._decoding.run, 0)

    def commit(self, schedule: Schedule, token_ids: Mapping[int, int]) -> list[Sequence]:
        """Takes a collected step's tokens in; returns the sequences that grew, in batch order."""
        if self._offload is not None:
            self._offload.commit(schedule.batch.transfers)
            self.num_prefix_hit_tokens += sum(item.num_loaded for item in schedule.chunks)
        return schedule.commit(token_ids, self.blocks)

    def undo(self, schedule: Schedule) -> None:
        """Takes a step back that failed: its sequences keep their blocks and can be planned again.

        What it wrote lies at positions that were never committed: they are written again.
        """
        self._num_departed += 1
        schedule.undo()
        if self._offload is not None:
            self._offload.undo(schedule.batch.transfers)

    def put_off(self, schedule: Schedule, sequences: Set[Sequence]) -> None:
        """Takes the last token of sequences out of a step that is not committed, and holds them:
        they keep their blocks and are not planned until `is_held` is taken back."""
        self._num_departed += 1
        schedule.put_off(sequences)
        for sequence in sequences:
            sequence.is_held = True

    def admit_at_once(self, sequence: Sequence) -> None:
        """Gives it blocks ahead of all others, which are preempted as far as need be. For the
        engine's self-test, while nothing is in flight."""
        num_tokens = min(sequence.max_num_tokens, self._capacity_tokens)
        while not self.blocks.allocate(sequence, num_tokens):
            self._preempt(self.running.last)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def announce_again(self, schedule: Schedule) -> None:
        """Reports the sequences that are gone again: the launch that reported them failed."""
        self._gone_seq_ids = [*schedule.batch.finished_seq_ids, *self._gone_seq_ids]

    def check_integrity(self) -> None:
        """Raises IntegrityError when the block books do not balance."""
        self.blocks.check_integrity(map(self.blocks.held, (*self.running, *self.waiting)))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempts from the last claim up until the sequence fits; False if it was itself the last.

        Never takes back tokens planned in this step: decodes are planned in the order of their
        claims. A chunk has its blocks since its sequence was admitted, or got them for those that
        its window has left; where others still hold these, it gives up its own.
        """
        while not self.blocks.allocate(sequence, num_tokens):
            if sequence.num_missing_tokens > 1:
                self._preempt(sequence)
                return False
            victim = self._claims.pop()
            while victim.status is not SequenceStatus.RUNNING:
                victim = self._claims.pop()
            self._preempt(victim, sequence)
            if victim is sequence:
                return False
        return True

    def _by_claim(self) -> list[Sequence]:
        """Returns the running sequences; the last is preempted first when blocks run out.

        That is the last rank of the tenant with the most slots: otherwise a late sequence would
        pay for another tenant's long outputs. The first of all ranks is never the last of several
        here, so it runs to its end, and the others after it.
        """
        self._claims = list(self.running)
        if self.blocks.num_available < self._num_spare and self._shares.num_tenants > 1:
            self._claims.sort(key=self._shares.claim)
        return list(self._claims)

    def _is_due(self, newcomer: Sequence) -> bool:
        """Returns whether sequences of a lower class, or another tenant's, give up blocks before a
        newcomer's would."""
        if not self.running:
            return False
        first, last, own = (
            self._rank(s)[:-1] for s in (self.running.first, self.running.last, newcomer)
        )
        return last > own or (first == last == own and self._shares.is_due(newcomer))

    def _share_slots(self) -> None:
        """Preempts sequences of lower classes for the next waiting one, or one of a large holder,
        if shares require it.

        Only if the newcomer then has blocks as well: otherwise no sequence would gain. For one
        newcomer per step, which then admits it.
        """
        if not self._shares_changed or not self.waiting:
            return
        newcomer = self._shares.next_of(self.waiting)
        if newcomer.in_flight:
            return  # it has to know its last token first
        if self._make_way(newcomer) or len(self.running) < self._num_slots:
            return
        self._shares_changed = False
        giver = self._shares.giver(newcomer, self.running)
        if giver is None:
            return
        hits = self.blocks.match(newcomer)
        if self.blocks.can_allocate(newcomer, newcomer.num_tokens, hits, self._num_spare):
            self._preempt(giver, newcomer)  # which changes the shares

    def _make_way(self, newcomer: Sequence) -> bool:
        """Preempts sequences of lower classes until the newcomer has a slot and blocks, and returns
        whether it preempted any: none, if all of them would not be enough."""
        own = self._rank(newcomer)[:-1]
        if not self.running or self._rank(self.running.last)[:-1] <= own:
            return False
        lower = self._shares.lower(newcomer, self.running)
        blocks, num_tokens = self.blocks, newcomer.num_tokens
        hits = blocks.match(newcomer)
        num_held = sum(len(blocks.held(one)) for one in lower)
        if not blocks.can_allocate(newcomer, num_tokens, hits, -num_held):
            return False  # as is mostly clear without a look at each block
        num_freed = blocks.num_of_none_but(lower, hits)
        if not blocks.can_allocate(newcomer, num_tokens, hits, -num_freed):
            return False
        num_before = len(self.running)
        for sequence in lower:
            has_slot = len(self.running) < self._num_slots
            if has_slot and blocks.can_allocate(newcomer, num_tokens, hits):
                break
            self._preempt(sequence, newcomer)
        return len(self.running) < num_before

    def _stop_running(self, sequence: Sequence) -> None:
        self._num_departed += 1
        self.running.remove(sequence)
        self._shares.give_back(sequence)
        self._shares_changed = True

    def _preempt(self, sequence: Sequence, other: Sequence | None = None) -> None:
        """Takes slot and blocks from a running sequence, for the `other`."""
        gives_way = other is not None and self._rank(sequence)[:-1] > self._rank(other)[:-1]
        self._stop_running(sequence)
        self.blocks.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_computed_tokens = 0
        sequence.num_scheduled_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if gives_way:
            sequence.num_lane_preemptions += 1
            self.gave_way.append(sequence)
        self.waiting.add(sequence)

    def _admit(self, draft: Draft) -> None:
        blocks = self.blocks
        while self.waiting and draft.left and len(self.running) < self._num_slots:
            sequence = self._shares.next_of(self.waiting)
            if sequence.in_flight:
                break  # it has to know its last token first; order is kept
            if self._held_blocks(sequence.num_tokens) > blocks.num_blocks:
                draft.outgrown.append(sequence)  # by the token in flight when it was preempted
                break
            hits = blocks.match(sequence)
            # Spare blocks for those that run; the holder of more slots gives blocks up instead.
            spare = 0 if self._is_due(sequence) else self._num_spare
            if not blocks.can_allocate(sequence, sequence.num_tokens, hits, spare):
                break
            blocks.touch_copies(sequence, len(hits))
            allocated = blocks.allocate(sequence, sequence.num_tokens, hits)
            assert allocated
            num_hit_tokens = blocks.tokens_in(hits)
            self.waiting.remove(sequence)
            sequence.num_computed_tokens = num_hit_tokens
            if self._has_prefix_cache:
                self.num_prefix_query_tokens += sequence.num_tokens
            self.num_prefix_hit_tokens += num_hit_tokens
            if sequence.status is SequenceStatus.WAITING:
                sequence.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens)
            sequence.status = SequenceStatus.RUNNING
            self._shares.take(sequence)
            self.running.add(sequence)
            self._plan(sequence, min(sequence.num_tokens, num_hit_tokens + draft.left), draft)

    def _plan(self, sequence: Sequence, end: int, draft: Draft) -> None:
        """Plans the sequence up to `end`, or to its last block, as a decode or as a chunk. Tokens
        that are loaded come on top."""
        start, num_loaded = sequence.next_position, 0
        if self._offload is not None:
            num_loaded, has_more = self.blocks.load(sequence, start, draft.left_to_load)
            draft.left_to_load -= num_loaded
            end = min(end + num_loaded, sequence.num_virtual_tokens)
            if has_more:
                end = start + num_loaded  # the next step loads more
        end = min(end, self.blocks.tokens_in(sequence.block_table))
        if end <= start:
            return  # its blocks come when the window leaves others
        draft.left -= end - start - num_loaded
        samples = end == sequence.num_virtual_tokens and not sequence.samples_nothing
        if samples and end - start == 1:
            draft.decoding.append(sequence)
            return
        scores = sequence.scores_between(start + num_loaded, end)
        draft.chunks.append(
            PlannedSequence(
                sequence, start, end - start, samples, sequence.num_preemptions, scores, num_loaded
            )
        )

    def _batch_of(self, step: DecodeStep | None, chunks: list[PlannedSequence]) -> ScheduledBatch:
        others = []
        for item in chunks:
            sequence, start = item.sequence, item.start + item.num_loaded
            sequence.num_scheduled_tokens += item.num_tokens
            if start == item.end:
                continue
            others.append(
                ScheduledSequence(
                    seq_id=sequence.seq_id,
                    start=start,
                    num_scheduled_tokens=item.end - start,
                    token_ids=sequence.token_ids[start : item.end],
                    block_table=sequence.block_table,
                    samples=item.samples,
                    params=sequence.params,
                    prompt_token_ids=sequence.prompt_token_ids,
                    output_token_ids=sequence.output_token_ids,
                    scores=item.scores,
                    tenant=sequence.tenant,
                )
            )
            if item.samples:
                sequence.in_flight += 1
            self._launched_seq_ids.add(sequence.seq_id)
        if step is not None:
            assert self._decoding is not None
            for sequence in self._decoding.sequences:
                sequence.num_scheduled_tokens += 1
                sequence.in_flight += 1
        transfers = self._offload.take_transfers() if self._offload is not None else ()
        if step is None and not others and not transfers:
            return ScheduledBatch(())
        gone, self._gone_seq_ids = tuple(self._gone_seq_ids), []
        return ScheduledBatch(tuple(others), gone, decodes=step, transfers=transfers)
