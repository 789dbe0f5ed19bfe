"""Engine: plan, run, commit. The one object that a worker's process, or an offline run, drives.

    step():   schedule --> launch --> collect --> commit --> outputs        lookahead 0
              schedule --> launch --> collect the step before --> ...       lookahead 1

With lookahead the next step is on the device before the host looks at the last one, so the device
never waits for book-keeping. Outputs are the same; a sequence that stops costs one stray token.
Sequences with a grammar are sampled after the others: their mask depends on the previous token, so
they are sampled when the previous step is committed and before the next one is launched. One whose
mask is not ready in time is held: it skips steps until it is, and the others continue.

A fault of one sequence ends that sequence. A step that raises is computed again: when it was out of
memory with fewer prompt tokens, then with fewer sequences, the youngest being preempted; else one
sequence at a time. A sequence whose step raises alone is ended if the self-test passes. `step`
raises EngineFailed when no further step can succeed in this process, and IntegrityError when the
books are wrong; no sequence is ended then, and another engine can resume each of them.

Not thread-safe: the thread that made the engine calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from shared.messages import ErrorCode, FinishReason
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine.errors import (
    EngineFailed,
    EngineFull,
    IntegrityError,
    OutOfMemory,
    RequestRefused,
    StepsFailed,
)
from worker.engine.launched import FailedLaunch, LaunchedStep
from worker.engine.measures import EngineCounts, StepMeasures
from worker.engine.offload import OffloadCounts, OffloadDisk
from worker.engine.outputs import failed_output, grown_output, stopped_output, times_of
from worker.engine.pacer import ChunkPacer
from worker.engine.plan import PlannedSequence, Schedule
from worker.engine.ports import ModelRunner, StepResult
from worker.engine.recovery import (
    MAX_FAILED_STEPS,
    StepRecovery,
    failure_of,
    self_test,
    valid_tokens,
)
from worker.engine.request import EngineOutput, EngineRequest, EngineStats, check_request
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.stop import StopMatch

log = logging.getLogger(__name__)


HELD_WAIT_S = 0.05  # of a step that has nothing to compute

NOTHING_PLANNED = Schedule(ScheduledBatch(()))


class Engine:
    """Runs many requests at once on one ModelRunner. Raises ValueError for an unknown policy."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        clock: Callable[[], float] | None = None,
        disk: OffloadDisk | None = None,
    ) -> None:
        """`clock` returns seconds, for the config's step target. Without one the run is not paced:
        a long step delays no reader of an offline run. `disk` gets what the config's offload blocks
        have no room for."""
        self.config = config
        self._clock = clock or (lambda: 0.0)
        self._pacer = None
        if config.step_target_s is not None and clock is not None:
            self._pacer = ChunkPacer(config.step_target_s, config.max_num_batched_tokens)
        self._runner = runner
        self._scheduler = Scheduler(config)
        if self._scheduler.blocks.offload is not None:
            self._scheduler.blocks.offload.disk = disk
        self._recovery = StepRecovery(config.max_num_batched_tokens)
        self._live: dict[str, Sequence] = {}
        self._ended_on_arrival: dict[str, EngineOutput] = {}
        self._in_flight: LaunchedStep | None = None  # between two calls of `step`
        self._held: dict[Sequence, Future[None]] = {}  # with the future that each waits for
        self._next_seq_id = 0
        self._counts = EngineCounts()
        self.measures = StepMeasures(drain_prefixes=self._scheduler.blocks.prefixes.drain)

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRefused when the request could never run here. Changes nothing."""
        check_request(request, self.config, self._runner.vocab_size)

    def add(self, request: EngineRequest) -> None:
        """Adds a request; `step` returns its outputs. Raises RequestRefused, such as EngineFull."""
        self.check(request)
        request_id = request.request_id
        if request_id in self._live or request_id in self._ended_on_arrival:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID, f"request {request_id!r} is running already"
            )
        num_waiting = len(self._scheduler.waiting) + len(self._ended_on_arrival)
        if num_waiting >= self.config.max_waiting:
            raise EngineFull(self.config.max_waiting)
        max_model_len, now_s = self.config.max_model_len, self._clock()
        sequence = Sequence.of(request, self._next_seq_id, max_model_len, now_s)
        self._next_seq_id += 1
        # An earlier attempt may have died between its last token and the report of its end.
        if stop := sequence.find_stop(self.config.eos_token_ids):
            self._ended_on_arrival[request_id] = stopped_output(sequence, stop)
            return
        self._live[request_id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state; its blocks are free at once and it has no further outputs.

        Wins over a finish that is still on the device. False, and no more, when it is not live.
        """
        if self._ended_on_arrival.pop(request_id, None) is not None:
            return True
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.finish(sequence)
        return True

    def has_unfinished(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._live or self._ended_on_arrival or self._in_flight)

    def step(self) -> list[EngineOutput]:
        """Runs one step and returns its outputs. Waits for the device, and for nothing else.

        Raises EngineFailed when no further step can succeed in this process, and IntegrityError
        when the engine cannot be trusted any more.
        """
        outputs = list(self._ended_on_arrival.values())
        self._ended_on_arrival.clear()
        outputs += self._sample_structured()
        self._release_held()
        begin_s = self._clock()
        schedule = self._schedule()
        self.measures.gave_way = [s.request_id for s in self._scheduler.gave_way]
        self._scheduler.gave_way.clear()
        outputs += map(self._outgrew, schedule.outgrown)
        launched = self._launch(schedule, begin_s)
        due = self._due(launched)
        for step in due:
            outputs += self._collect(step)
        if not outputs and not due and launched is None:
            self._wait_for_held()
        return outputs

    def self_test(self) -> None:
        """Computes a few tokens of no request. Raises EngineFailed. Counts nothing."""
        assert self._in_flight is None, "steps are collected in launch order"
        self._next_seq_id += 1
        self_test(self._next_seq_id - 1, self.config, self._scheduler, self._runner)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        offload = scheduler.blocks.offload
        copied = offload.counts if offload is not None else OffloadCounts()
        num_running = len(scheduler.running)
        num_prefilling = sum(s.num_missing_tokens > 1 for s in scheduler.running)
        return EngineStats(
            step=self._counts.num_steps,
            waiting=len(scheduler.waiting),
            prefilling=num_prefilling,
            active=num_running - num_prefilling,
            running=num_running,
            preemptions=scheduler.num_preemptions,
            free_blocks=scheduler.blocks.num_available,
            cached_blocks=scheduler.blocks.num_cached,
            total_blocks=scheduler.blocks.num_blocks,
            prompt_tokens=self._counts.num_prompt_tokens,
            generated_tokens=self._counts.num_generated_tokens,
            prefix_query_tokens=scheduler.num_prefix_query_tokens,
            prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            mixed_steps=self._counts.num_mixed_steps,
            failed_steps=self._recovery.num_failed,
            offload_blocks=offload.num_blocks if offload is not None else 0,
            offload_disk_blocks=offload.num_disk_blocks if offload is not None else 0,
            offload_stored_blocks=copied.stored_blocks,
            offload_loaded_blocks=copied.loaded_blocks,
            offload_unwritten_blocks=copied.unwritten_blocks,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken. O(blocks)."""
        scheduler = self._scheduler
        if len(scheduler.running) + len(scheduler.waiting) != len(self._live):
            raise IntegrityError("the queues and the live requests differ")
        if any(s.block_table or s.next_position for s in scheduler.waiting):
            raise IntegrityError("a waiting sequence holds blocks or claims computed tokens")
        scheduler.check_integrity()

    def _schedule(self) -> Schedule:
        recovery = self._recovery
        paced = self._pacer.tokens if self._pacer else None
        while (alone := recovery.next_alone) is not None:
            if self._in_flight is not None:
                return NOTHING_PLANNED  # it is computed when the step before is known
            schedule = self._scheduler.schedule(most_tokens=recovery.most_tokens, only=alone)
            if not schedule.batch.is_empty or schedule.outgrown:
                return schedule
            recovery.rejoin(alone)  # no block was left for it: it waits like others
        return self._scheduler.schedule(paced, most_tokens=recovery.most_tokens)

    def _sample_structured(self) -> list[EngineOutput]:
        """Samples the rows that waited for the previous step; a failure is the whole step's."""
        step = self._in_flight
        if step is None:
            return []
        try:
            self._hold(step, step.sample_structured())
        except Exception as error:
            self._in_flight = None
            self._scheduler.undo(step.schedule)
            return self._recover(step.schedule.planned, error)
        return []

    def _launch(self, schedule: Schedule, now_s: float) -> LaunchedStep | FailedLaunch | None:
        """Returns None where nothing is to be computed."""
        if schedule.batch.is_empty:
            return None
        self._counts.launching(schedule)
        self.measures.tokens.observe(schedule.batch.num_tokens)
        self.measures.sequences.observe(len(schedule.batch))
        for sequence in (*schedule.fresh, *(item.sequence for item in schedule.chunks)):
            if sequence.begun_s is None:
                sequence.begun_s = now_s
        try:
            step = LaunchedStep(self._runner, schedule, self._clock)
            if not self.config.lookahead:
                self._hold(step, step.sample_structured())
        except Exception as error:
            return FailedLaunch(schedule, error)
        return step

    def _due(
        self, launched: LaunchedStep | FailedLaunch | None
    ) -> list[LaunchedStep | FailedLaunch]:
        """Returns the steps to collect now, in launch order. With lookahead that is the step before
        this one, which stays in flight, unless its launch failed."""
        steps: list[LaunchedStep | FailedLaunch | None] = [self._in_flight, launched]
        self._in_flight = None
        if self.config.lookahead and isinstance(launched, LaunchedStep):
            self._in_flight = launched
            steps.pop()
        return [step for step in steps if step is not None]

    def _hold(self, step: LaunchedStep, put_off: dict[Sequence, Future[None]]) -> None:
        """Removes sequences from a step until their futures are done."""
        if put_off:
            self._scheduler.put_off(step.schedule, put_off.keys())
            self._held |= put_off

    def _release_held(self) -> None:
        """Releases held sequences whose futures are done, and forgets those that have ended."""
        for sequence, waits_for in list(self._held.items()):
            if sequence.is_finished or waits_for.done():
                sequence.is_held = False
                del self._held[sequence]

    def _wait_for_held(self) -> None:
        """Waits a moment in a step that has nothing to compute. Raises IntegrityError where nothing
        is held either."""
        if self._held:
            wait(self._held.values(), HELD_WAIT_S, FIRST_COMPLETED)
        elif self._live:
            raise IntegrityError("sequences live, but none can be planned")

    def _collect(self, step: LaunchedStep | FailedLaunch) -> list[EngineOutput]:
        """Waits for a step, commits it, and returns the outputs of its sequences. One that failed
        is undone, and so is the one launched after it."""
        schedule = step.schedule
        try:
            result = step.collect(self._pacer)
        except Exception as error:
            if isinstance(step, FailedLaunch):
                self._scheduler.announce_again(schedule)
            self._scheduler.undo(schedule)
            self._discard_in_flight()
            return self._recover(schedule.planned, error)
        self._recovery.succeeded()
        token_ids = valid_tokens(schedule.decoding, result, self._runner.vocab_size)
        looked_at = schedule.chunks if token_ids is not None else schedule.planned
        outputs = self._fail_sequences(looked_at, result)
        outputs += schedule.score_outputs(result)
        grown = self._scheduler.commit(schedule, result.token_ids)
        self._counts.committed(schedule, len(grown))
        outputs += self._grow(schedule, grown, token_ids, result)
        return outputs + self._end_computed_prompts(schedule.chunks, self._clock())

    def _grow(
        self,
        schedule: Schedule,
        grown: list[Sequence],
        token_ids: list[int] | None,
        result: StepResult,
    ) -> list[EngineOutput]:
        """Returns the outputs of the sequences that a step gave a token, and ends those that stop.

        `token_ids` are the decodes', if all are valid.
        """
        outputs: list[EngineOutput] = []
        recovery, decoding, step = self._recovery, schedule.decoding, schedule.batch.decodes
        now_s = self._clock()
        eos_token_ids = self.config.eos_token_ids
        if (
            decoding is not None
            and step is not None
            and token_ids is not None
            and not recovery.has_isolated
            and len(grown) >= len(decoding)
            and grown[len(decoding) - 1] is decoding.sequences[-1]  # all of them have grown
        ):
            plain = decoding.outputs(step.number, token_ids, eos_token_ids)
            if plain is not None:
                outputs += plain
                grown = grown[len(decoding) :]
        has_isolated = recovery.has_isolated
        for sequence in grown:
            if has_isolated:
                recovery.rejoin(sequence)
            is_first, known = sequence.first_token_s is None, sequence.token_ids
            if is_first:
                sequence.first_token_s = now_s
            stop = None
            if (  # otherwise none can match; few of hundreds of sequences end in a step
                len(known) >= sequence.max_num_tokens
                or known[-1] in eos_token_ids
                or sequence.params.stop_token_ids
            ):
                stop = sequence.find_stop(eos_token_ids)
            if stop is not None:
                self._end(sequence)
            times = times_of(sequence, now_s) if is_first or stop is not None else None
            outputs.append(grown_output(sequence, result.logprobs, stop, times))
        return outputs

    def _end_computed_prompts(
        self, planned: tuple[PlannedSequence, ...], now_s: float
    ) -> list[EngineOutput]:
        """Ends the sequences that request only log probabilities of the prompt."""
        outputs = []
        for item in planned:
            sequence = item.sequence
            if not sequence.samples_nothing or sequence.is_finished:
                continue
            if sequence.num_computed_tokens == sequence.num_prompt_tokens:
                self._end(sequence)
                stop = StopMatch(FinishReason.LENGTH)
                outputs.append(stopped_output(sequence, stop, times_of(sequence, now_s)))
        return outputs

    def _discard_in_flight(self) -> None:
        """Discards the step launched after one that failed: its inputs are invalid."""
        behind, self._in_flight = self._in_flight, None
        if behind is not None:
            behind.discard()
            self._scheduler.undo(behind.schedule)

    def _fail_sequences(
        self, planned: tuple[PlannedSequence, ...], result: StepResult
    ) -> list[EngineOutput]:
        """Ends the sequences whose own computation failed, before their tokens are committed."""
        outputs = []
        for item in planned:
            sequence = item.sequence
            if sequence.is_finished:
                continue
            failure = failure_of(item, result, self._runner.vocab_size)
            if failure is not None:
                outputs.append(self._fail(sequence, *failure))
        return outputs

    def _recover(
        self, planned: tuple[PlannedSequence, ...], error: Exception
    ) -> list[EngineOutput]:
        """Decides how the sequences of a step that raised, and was undone, continue.

        Returns the end of the one that is at fault, if it is known. Raises EngineFailed.
        """
        log.error(
            "step failed",
            exc_info=error,
            extra={"request_ids": [item.sequence.request_id for item in planned]},
        )
        if isinstance(error, EngineFailed):
            raise error
        recovery = self._recovery
        self.check_integrity()
        sequences = [item.sequence for item in planned if not item.sequence.is_finished]
        if isinstance(error, OutOfMemory):
            num_decodes = sum(item.is_decode for item in planned)
            num_tokens = sum(item.num_tokens - item.num_loaded for item in planned)
            if recovery.shrink(num_decodes, num_tokens - num_decodes):
                return []
        else:
            recovery.raised()
            if recovery.num_failed_in_row >= MAX_FAILED_STEPS:
                raise StepsFailed(
                    f"{recovery.num_failed_in_row} steps failed in a row, the last with "
                    f"{type(error).__name__}: {error}"
                ) from error
            if len(planned) > 1 or recovery.next_alone is None:
                recovery.isolate(sequences)
                return []
        # It was alone. Is it the sequence, or would any step fail?
        self.self_test()
        message = f"the step failed: {type(error).__name__}"
        return [self._fail(sequence, ErrorCode.ENGINE_ERROR, message) for sequence in sequences]

    def _outgrew(self, sequence: Sequence) -> EngineOutput:
        most = self.config.sequence_capacity_tokens
        return self._fail(
            sequence,
            ErrorCode.KV_CAPACITY_EXCEEDED,
            f"the sequence has outgrown the KV cache of {most} tokens",
        )

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str) -> EngineOutput:
        self._end(sequence)
        return failed_output(sequence, code, message)

    def _end(self, sequence: Sequence) -> None:
        self._recovery.rejoin(sequence)
        self._scheduler.finish(sequence)
        del self._live[sequence.request_id]
