"""JobRunner: what becomes of a claimed job, from its delivery to its end.

Purely synchronous: the service's one owner task calls it, so the table changes in one place and
nothing happens between two lines. Work for others leaves through the engine's `send` and the
Publisher.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shared.messages import ErrorCode, FinishReason, JobState
from shared.transport.base import AppendStatus, Delivery, JobEnd
from worker.engine_messages import (
    AddRequest,
    CancelRequest,
    RequestRejected,
    StepOutputs,
    ToEngine,
    TokensOut,
)
from worker.output import OutputProcessor, Piece, ReplayMismatch, ended_already
from worker.publisher import Publisher, Settled
from worker.running_jobs import RunningJob, RunningJobs
from worker.served_model import JobRefused, ServedModel

log = logging.getLogger(__name__)


class JobRunner:
    """Moves jobs between the queue's deliveries, the engine and the Publisher."""

    def __init__(
        self,
        jobs: RunningJobs,
        model: ServedModel,
        publisher: Publisher,
        send: Callable[[ToEngine], None],
    ) -> None:
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
            self._forget(stale)
        running = RunningJob(
            job=job,
            attempt=delivery.attempt,
            processor=None,
            num_resumed=len(delivery.output_token_ids),
            num_tokens=len(delivery.output_token_ids),
            cached_tokens=delivery.cached_tokens if delivery.output_token_ids else None,
        )
        self._jobs.add(running)
        self._publisher.open(job.job_id, delivery.attempt, delivery.end, delivery.output_token_ids)
        log.info(
            "job started",
            extra={
                "job_id": job.job_id,
                "attempt": delivery.attempt,
                "prompt_tokens": len(job.prompt_token_ids),
                "resumed_tokens": running.num_resumed,
                "max_tokens": job.sampling.max_tokens,
            },
        )
        self._start(running, delivery)

    def _start(self, running: RunningJob, delivery: Delivery) -> None:
        job = running.job
        ended = ended_already(delivery.output_token_ids, job.sampling, self._model.eos_token_ids)
        try:
            self._model.check(job)
            processor = OutputProcessor(self._model.tokenizer, job.sampling)
            replayed = processor.replay(
                delivery.output_token_ids,
                delivery.end,
                ends_by_token=ended is not None and ended[0] is FinishReason.STOP,
            )
        except (JobRefused, ReplayMismatch) as error:
            self._fail(running, error.code, str(error))
            return
        running.processor = processor
        if replayed.finish_reason is not None:
            self._say(running, replayed)
            return
        if ended is not None:
            reason, stop_reason = ended
            self._say(running, Piece((), processor.abort(), None, reason, stop_reason))
            return
        self._jobs.enter_engine(running)
        self._send(
            AddRequest(
                request_id=running.request_id,
                prompt_token_ids=job.prompt_token_ids,
                output_token_ids=delivery.output_token_ids,
                sampling=job.sampling,
                tenant=job.tenant,
                priority=job.lane,
            )
        )

    def take(self, step: StepOutputs) -> None:
        """One step's outputs of all jobs."""
        for output in step.outputs:
            running = self._jobs.by_request_id(output.request_id)
            if running is not None and running.in_engine:
                self._take_output(running, output)

    def _take_output(self, running: RunningJob, output: TokensOut) -> None:
        assert running.processor is not None, "the engine has jobs with a processor only"
        if running.cached_tokens is None:
            running.cached_tokens = output.num_cached_tokens
            self._publisher.note_cached_tokens(running.job.job_id, output.num_cached_tokens)
        if output.token_ids and running.first_token_s is None:
            running.first_token_s = time.monotonic()
        natural = output.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
        piece = running.processor.push(
            output.token_ids,
            output.logprobs,
            output.finish_reason if natural else None,
            output.stop_reason,
        )
        if output.finish_reason is not None:
            self._jobs.leave_engine(running)
        self._say(running, piece)
        if not natural and piece.finish_reason is None:
            self._fail(running, output.error or ErrorCode.ENGINE_ERROR, output.message)

    def refuse(self, rejected: RequestRejected) -> None:
        """The engine did not take the job."""
        running = self._jobs.by_request_id(rejected.request_id)
        if running is not None and running.in_engine:
            self._jobs.leave_engine(running)
            self._fail(running, rejected.code, rejected.message)

    def cancel(self, job_id: str, attempt: int | None, why: str) -> None:
        """Drops a job that ended elsewhere or is another's. `attempt` None: whichever runs."""
        running = self._jobs.get(job_id)
        if running is None or (attempt is not None and running.attempt != attempt):
            return
        self._forget(running)
        _log_end(running, why)

    def stop_engine_work(self, job_id: str, attempt: int) -> None:
        """The publisher ends the job as failed: no more tokens of it are wanted."""
        running = self._jobs.get(job_id)
        if running is not None and running.attempt == attempt:
            running.end_reason = ErrorCode.ENGINE_ERROR.value
            self._leave_engine(running)

    def settle(self, settled: Settled) -> None:
        """The publisher is done with a job."""
        running = self._jobs.get(settled.job_id)
        if running is None or running.attempt != settled.attempt:
            return
        self._leave_engine(running)
        self._jobs.remove(running)
        if settled.status is AppendStatus.OK:
            _log_end(running, running.end_reason, running.end_detail)
        else:
            _log_end(running, settled.status.value, settled.detail)

    def halt(self) -> None:
        """The engine drops everything; what it has said so far can still be published."""
        for running in self._jobs:
            self._leave_engine(running)

    def surrender(self) -> list[RunningJob]:
        """Empties the table: the claims that somebody must give back to the queue."""
        jobs = list(self._jobs)
        for running in jobs:
            self._forget(running)
        return jobs

    def surrender_engine(self) -> list[RunningJob]:
        """The same for the jobs in the engine, which is gone; ended ones stay to be written."""
        jobs = [running for running in self._jobs if running.in_engine]
        for running in jobs:
            self._jobs.remove(running)
            self._publisher.drop(running.job.job_id)
        return jobs

    def _say(self, running: RunningJob, piece: Piece) -> None:
        job_id = running.job.job_id
        running.num_tokens += len(piece.token_ids)
        self._publisher.add(job_id, piece.token_ids, piece.text, piece.logprobs)
        if piece.finish_reason is None:
            return
        self._leave_engine(running)  # a stop string is found here; the engine does not know of it
        self._finish(
            running,
            JobEnd(
                state=JobState.FINISHED,
                reason=piece.finish_reason.value,
                usage=running.usage,
                stop_reason=piece.stop_reason,
            ),
        )

    def _fail(self, running: RunningJob, code: ErrorCode, message: str) -> None:
        self._leave_engine(running)
        if running.processor is not None:
            self._publisher.add(running.job.job_id, (), running.processor.abort(), None)
        self._finish(
            running,
            JobEnd(state=JobState.FAILED, reason=code.value, usage=running.usage, message=message),
        )

    def _finish(self, running: RunningJob, end: JobEnd) -> None:
        running.end_reason, running.end_detail = end.reason, end.message
        self._publisher.finish(running.job.job_id, end)

    def _forget(self, running: RunningJob) -> None:
        self._leave_engine(running)
        self._jobs.remove(running)
        self._publisher.drop(running.job.job_id)

    def _leave_engine(self, running: RunningJob) -> None:
        if running.in_engine:
            self._jobs.leave_engine(running)
            self._send(CancelRequest(running.request_id))


def _log_end(running: RunningJob, reason: str, detail: str = "") -> None:
    now_s = time.monotonic()
    first_s = running.first_token_s
    fields: dict[str, object] = {
        "job_id": running.job.job_id,
        "attempt": running.attempt,
        "reason": reason,
        "tokens": running.num_tokens,
        "cached_tokens": running.cached_tokens or 0,
        "first_token_ms": None if first_s is None else round((first_s - running.begun_s) * 1e3),
        "total_ms": round((now_s - running.begun_s) * 1e3),
    }
    if detail:
        fields["detail"] = detail
    log.info("job ended", extra=fields)
