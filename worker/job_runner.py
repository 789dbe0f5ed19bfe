"""JobRunner: runs claimed jobs from their delivery to their end.

Nothing here awaits, so tasks that call it never interleave and need no lock or mailbox. A method
that waits would break this; such work belongs to the Publisher or the service.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from shared.messages import MIN_SEED, START, Cursor, ErrorCode, FinishReason, Job, JobState, Segment
from shared.transport.ports.queue import AppendStatus, Delivery, JobEnd, LoggedChoice
from worker.checkpoint import JobRefused, LoadedModel
from worker.engine.queue import HIGHEST_PRIORITY
from worker.engine.request import EngineOutput, EngineRequest
from worker.engine.running_slots import MAX_LANE_PREEMPTIONS
from worker.engine.stop import find_stop
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox, Settled
from worker.output import OutputChunk, OutputProcessor, ReplayMismatch
from worker.publisher import Output
from worker.running_jobs import RunningChoice, RunningJob, RunningJobs
from worker.runtime.messages import (
    AddChoices,
    AddRequest,
    CancelRequest,
    ChoiceStart,
    RequestRejected,
    StepOutputs,
    ToEngine,
)
from worker.traces import ENGINE_DIED, HANDED_BACK, SUPERSEDED, JobTraces

log = logging.getLogger(__name__)


class JobRunner:
    """Moves jobs between the queue's deliveries, the engine and the Publisher."""

    def __init__(
        self,
        jobs: RunningJobs,
        model: LoadedModel,
        publisher: Output,
        send: Callable[[ToEngine], None],
        metrics: WorkerMetrics,
        traces: JobTraces,
    ) -> None:
        self._metrics = metrics
        self._traces = traces
        self._jobs = jobs
        self._model = model
        self._publisher = publisher
        self._send = send

    def admit(self, delivery: Delivery) -> None:
        """Starts a claimed job where its log ends."""
        job = delivery.job
        stale = self._jobs.get(job.job_id)
        if stale is not None:
            if stale.attempt >= delivery.attempt:
                return
            self._forget(stale, SUPERSEDED)
        running = RunningJob.of(delivery)
        self._jobs.add(running)
        self._start(running, delivery)
        self._metrics.job_taken(delivery.attempt, is_by_prefix=delivery.is_by_prefix)
        self._traces.taken(running, delivery)
        log.info(
            "job started",
            extra={
                **running.log_fields,
                "prompt_tokens": len(job.prompt_token_ids),
                "resumed_tokens": running.num_resumed,
                "max_tokens": job.sampling.max_tokens,
                "choices": job.num_choices,
            },
        )

    def _start(self, running: RunningJob, delivery: Delivery) -> None:
        """Sends the first choice that has not ended to the engine.

        The others follow when the blocks of the prompt have been computed, and find them in the
        prefix cache.

        The request is sent as early as possible: the engine computes during the rest of the setup.
        """
        job = running.job
        try:
            self._model.check(job)
        except JobRefused as error:
            self._open_outbox(running, delivery)
            self._fail(running, error.code, str(error))
            return
        if delivery.end == START:
            self._enter_engine(running)
        self._open_outbox(running, delivery)
        try:
            starts = [self._take_up(job, choice) for choice in delivery.choices]
        except ReplayMismatch as error:
            self._fail(running, error.code, str(error))
            return
        for choice, (processor, _) in zip(running.choices, starts, strict=True):
            choice.processor = processor
        for choice, (_, last) in zip(running.choices, starts, strict=True):
            if last is not None:
                self._apply(running, choice, last)
        self._finish_if_over(running)
        if delivery.end != START:
            self._enter_engine(running)

    def _open_outbox(self, running: RunningJob, delivery: Delivery) -> None:
        """Opens the job's outbox: from now on it may have output."""
        running.outbox = Outbox.of(delivery)
        self._publisher.open(running.outbox)

    def _enter_engine(self, running: RunningJob) -> None:
        waiting = [choice for choice in running.choices if choice.finish_reason is None]
        for choice in waiting:
            self._jobs.enter_engine(choice)
        for choice in waiting[:1]:
            choice.was_sent = True
            self._send(AddRequest(self._engine_request(running, choice)))

    def _take_up(
        self, job: Job, logged: LoggedChoice
    ) -> tuple[OutputProcessor | None, OutputChunk | None]:
        """Returns a choice's processor where its log ends, and its last piece if it ended there.

        Raises ReplayMismatch.
        """
        if logged.finish_reason is not None:
            return None, None
        token_ids = logged.token_ids
        ended = find_stop(
            token_ids, job.sampling, self._model.eos_token_ids, job.sampling.max_tokens
        )
        processor = OutputProcessor(self._model.tokenizer, job.sampling)
        replayed = processor.replay(
            token_ids,
            Cursor(len(token_ids), logged.num_bytes),
            ends_by_token=ended is not None and ended.reason is FinishReason.STOP,
        )
        if replayed.finish_reason is not None:
            return processor, replayed
        if ended is not None:
            return processor, OutputChunk((), processor.abort(), None, ended.reason, ended.token_id)
        return processor, None

    def _start_others(self, running: RunningJob) -> None:
        """Starts the choices that wait for the first one's prompt."""
        job = running.job
        waiting = [choice for choice in running.choices if choice.has_slot and not choice.was_sent]
        if not waiting:
            return
        for choice in waiting:
            choice.was_sent = True
        self._send(
            AddChoices(
                self._engine_request(running, waiting[0]),
                tuple(
                    ChoiceStart(choice.request_id, _seed_of(job, choice), choice.resumed_token_ids)
                    for choice in waiting
                ),
            )
        )

    def take(self, message: StepOutputs | RequestRejected) -> None:
        """Takes the outputs of one step, or fails a job that the engine did not accept."""
        if isinstance(message, RequestRejected):
            self._refuse(message)
            return
        for output in message.outputs:
            found = self._jobs.by_request_id(output.request_id)
            if found is not None and found[1].has_slot:
                self._take_output(*found, output)
        for request_id in message.gave_way:
            found = self._jobs.by_request_id(request_id)
            if found is not None and found[1].has_slot:
                self._gave_way(*found)

    def _gave_way(self, running: RunningJob, choice: RunningChoice) -> None:
        """Notes that the engine has preempted a choice for a job of a higher lane."""
        choice.gave_way_s = time.monotonic()
        choice.num_lane_preemptions += 1
        self._jobs.num_preempted[running.job.lane] += 1
        self._metrics.gave_way(running.job.lane)
        log.info(
            "a job gave its slot to one of a higher lane, and waits",
            extra={**running.log_fields, "lane": running.job.lane, "tokens": running.num_tokens},
        )

    def _take_output(
        self, running: RunningJob, choice: RunningChoice, output: EngineOutput
    ) -> None:
        assert choice.processor is not None, "the engine has choices with a processor only"
        if of_prompt := output.prompt_logprobs or output.vectors:
            running.outbox.add_of_prompt(of_prompt)
            self._publisher.notice(running.outbox)
            return
        if choice.gave_way_s is not None:
            choice.gave_way_s = None
            running.outbox.num_lane_preemptions = running.num_lane_preemptions
        if running.cached_tokens is None:
            running.cached_tokens = output.num_cached_tokens
            running.outbox.cached_tokens = output.num_cached_tokens
        elif choice is running.choices[0] and running.outbox.cached_tokens == 0:
            running.cached_tokens = output.num_cached_tokens  # an upstream's may come with the end
        if output.token_ids and running.first_token_s is None:
            running.first_token_s = time.monotonic()
            self._jobs.changed.set()  # one fewer waits here for its first token
            self._traces.first_token(running, output.times)
        natural = output.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
        piece = choice.processor.push(
            output.token_ids,
            output.logprobs,
            output.finish_reason if natural else None,
            output.stop_reason,
        )
        if output.finish_reason is not None:
            self._jobs.leave_engine(choice)
            if output.times is not None:
                self._metrics.sequence_ended(running.waited_s, output.times)
        self._apply(running, choice, piece)
        if not natural and piece.finish_reason is None:
            self._fail(running, output.error or ErrorCode.ENGINE_ERROR, output.message)
            return
        if piece.finish_reason is not None:
            self._finish_if_over(running)
        if len(running.choices) > 1:
            self._start_others(running)

    def _refuse(self, rejected: RequestRejected) -> None:
        found = self._jobs.by_request_id(rejected.request_id)
        if found is not None and found[1].has_slot:
            running, choice = found
            self._jobs.leave_engine(choice)
            self._fail(running, rejected.code, rejected.message)

    def cancel(self, job_id: str, attempt: int | None, why: str) -> None:
        """Drops a job that ended elsewhere or is another's. `attempt` None: whichever runs."""
        running = self._jobs.get(job_id)
        if running is None or (attempt is not None and running.attempt != attempt):
            return
        self._forget(running, why)
        _log_end(running, why)

    def stop_engine_work(self, job_id: str, attempt: int) -> None:
        """Cancels a job in the engine, because the publisher ends it as failed."""
        running = self._jobs.get(job_id)
        if running is not None and running.attempt == attempt:
            running.end_reason = ErrorCode.ENGINE_ERROR.value
            self._leave_engine(*running.choices)

    def settle(self, settled: Settled) -> None:
        """Removes a job that the publisher has finished."""
        running = self._jobs.get(settled.job_id)
        if running is None or running.attempt != settled.attempt:
            return
        self._leave_engine(*running.choices)
        self._jobs.remove(running)
        if settled.status is AppendStatus.OK:
            outcome, detail = running.end_reason, running.end_detail
            self._metrics.job_ended(running)
        else:
            outcome, detail = settled.status.value, settled.detail
        self._traces.ended(running, outcome)
        _log_end(running, outcome, detail)

    def stop_all(self) -> None:
        """Cancels all jobs in the engine; their output so far can still be published."""
        for running in self._jobs:
            self._leave_engine(*running.choices)

    def take_all(self) -> list[RunningJob]:
        """Empties the table; returns the jobs, which must be given back to the queue."""
        jobs = list(self._jobs)
        for running in jobs:
            self._forget(running, HANDED_BACK)
        return jobs

    def take_preempted(self, waited_s: float) -> list[RunningJob]:
        """Removes and returns the jobs of which every choice has waited for so long since it was
        preempted for a higher lane, and whose output is durable."""
        jobs = [
            running
            for running in self._jobs
            if running.waits_preempted(time.monotonic() - waited_s)
            and not running.outbox.has_something
        ]
        for running in jobs:
            self._forget(running, HANDED_BACK)
        return jobs

    def take_from_engine(self) -> list[RunningJob]:
        """Removes and returns the jobs of an engine that died; ended ones stay to be written."""
        jobs = [running for running in self._jobs if running.in_engine]
        for running in jobs:
            self._jobs.remove(running)
            self._publisher.drop(running.job.job_id)
            self._traces.ended(running, ENGINE_DIED)
        return jobs

    def _apply(self, running: RunningJob, choice: RunningChoice, piece: OutputChunk) -> None:
        choice.num_tokens += len(piece.token_ids)
        self._publish(running, choice, piece)
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
            # A stop string is found here; the engine cannot see it.
            self._leave_engine(choice)

    def _publish(self, running: RunningJob, choice: RunningChoice, piece: OutputChunk) -> None:
        segment = None
        if running.job.num_choices > 1:
            segment = Segment(
                choice.index,
                len(piece.token_ids),
                len(piece.text.encode()),
                piece.finish_reason,
                piece.stop_reason,
            )
        running.outbox.add(piece.token_ids, piece.text, piece.logprobs, segment)
        self._publisher.notice(running.outbox)

    def _finish_if_over(self, running: RunningJob) -> None:
        """Ends the job when all choices have ended; reason LENGTH when one of them was cut."""
        reasons = {choice.finish_reason for choice in running.choices}
        if None in reasons:
            return
        reason = FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP
        alone = running.job.num_choices == 1
        self._finish(
            running,
            JobEnd(
                state=JobState.FINISHED,
                reason=reason.value,
                usage=running.usage,
                stop_reason=running.choices[0].stop_reason if alone else None,
            ),
        )

    def _fail(self, running: RunningJob, code: ErrorCode, message: str) -> None:
        """Ends the job as failed: one choice's failure ends all."""
        for choice in running.choices:
            self._leave_engine(choice)
            if choice.processor is not None and choice.finish_reason is None:
                self._publish(running, choice, OutputChunk((), choice.processor.abort()))
        self._finish(
            running,
            JobEnd(state=JobState.FAILED, reason=code.value, usage=running.usage, message=message),
        )

    def _finish(self, running: RunningJob, end: JobEnd) -> None:
        running.end_reason, running.end_detail = end.reason, end.message
        running.finished_s = time.monotonic()
        running.outbox.finish(end)
        self._publisher.notice(running.outbox)

    def _forget(self, running: RunningJob, why: str) -> None:
        self._leave_engine(*running.choices)
        self._jobs.remove(running)
        self._publisher.drop(running.job.job_id)
        self._traces.ended(running, why)

    def _engine_request(self, running: RunningJob, choice: RunningChoice) -> EngineRequest:
        job = running.job
        return EngineRequest(
            request_id=choice.request_id,
            prompt_token_ids=job.prompt_token_ids,
            params=replace(job.sampling, seed=_seed_of(job, choice)),
            output_token_ids=choice.resumed_token_ids,
            tenant=job.tenant,
            job_id=job.job_id,
            priority=job.lane
            if choice.num_lane_preemptions < MAX_LANE_PREEMPTIONS
            else HIGHEST_PRIORITY,
            num_lane_preemptions=choice.num_lane_preemptions,
            scores_prompt=running.num_resumed == 0,  # a log with output has them already
            pooling=job.pooling,
            adapter="" if job.model == self._model.name else job.model,
        )

    def _leave_engine(self, *choices: RunningChoice) -> None:
        for choice in choices:
            if choice.has_slot:
                self._jobs.leave_engine(choice)
                if choice.was_sent:
                    self._send(CancelRequest(choice.request_id))


def _seed_of(job: Job, choice: RunningChoice) -> int | None:
    return choice_seed(job.sampling.seed, choice.index)


def _log_end(running: RunningJob, reason: str, detail: str = "") -> None:
    now_s = time.monotonic()
    first_s = running.first_token_s
    fields: dict[str, object] = {
        **running.log_fields,
        "reason": reason,
        "tokens": running.num_tokens,
        "cached_tokens": running.cached_tokens or 0,
        "first_token_ms": None if first_s is None else round((first_s - running.begun_s) * 1e3),
        "total_ms": round((now_s - running.begun_s) * 1e3),
    }
    if detail:
        fields["detail"] = detail
    log.info("job ended", extra=fields)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_MASK = 2**64 - 1


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Returns a choice's seed: the job's for choice 0, else the k-th output of SplitMix64, less
    2**63.

    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.) None, which
    only greedy sampling may have, stays None.
    """
    if seed is None or choice == 0:
        return seed
    mixed = (seed + choice * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) + MIN_SEED
