"""What a worker adds to the traces of its jobs: a span of each attempt, and of the parts of it.

    queue      in the queue, before this claim
    attempt    from the claim until the job's end is durable, or the job is another's
      wait     in the engine, before the first step
      prefill  up to the first token
      decode   from there to the last token

A killed worker sends nothing of its attempt that it has not sent before. So the span of an
attempt has an id that follows from job and attempt: its parts refer to it before it is sent, and
the worker that takes the job over sends it where the other one could not, with a `decode` of what
the log had from it. A worker that was only taken for dead sends neither: its successor has.
"""

from __future__ import annotations

import time

import xxhash

from shared.messages import FinishReason
from shared.tracing import (
    Attributes,
    Span,
    SpanContext,
    SpanKind,
    Tracing,
    fail_span,
    read_context,
)
from shared.transport.ports.queue import AppendStatus, Delivery, LostClaim
from worker.engine.request import RequestTimes
from worker.running_jobs import RunningJob

WORKER_LOST = "worker_lost"
ENGINE_DIED = "engine_died"
HANDED_BACK = "handed_back"
CANCELLED = "cancelled"
DROPPED = "dropped"
SUPERSEDED = "superseded"
PUT_OFF = "put_off"

# Outcomes that are no faults. `ended`: elsewhere, while this worker ran it.
_NO_FAULTS = frozenset(
    {
        FinishReason.STOP,
        FinishReason.LENGTH,
        HANDED_BACK,
        CANCELLED,
        DROPPED,
        SUPERSEDED,
        PUT_OFF,
        AppendStatus.ENDED,
    }
)


class JobTraces:
    """Starts and ends the spans of one worker's jobs. A job without a trace has none."""

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._attempts: dict[tuple[str, int], _Attempt] = {}

    def taken(self, running: RunningJob, delivery: Delivery) -> None:
        """Starts the span of a job that has just been claimed; sends those of earlier attempts."""
        job = delivery.job
        if not (self._tracing.is_on and job.traceparent):
            return
        parent = read_context(job.traceparent, job.tracestate)
        if not parent.is_valid:
            return
        unix_s = time.time() - time.monotonic()  # of an instant of the steady clock
        claimed_s = running.begun_s + unix_s
        attributes: dict[str, str | int] = {
            "penstock.job.id": job.job_id,
            "gen_ai.request.model": job.model,
        }
        self._before(delivery, parent, claimed_s, attributes)
        earlier = range(max(1, delivery.attempt - 1), delivery.attempt)
        span = self._tracing.begin(
            "attempt",
            parent,
            kind=SpanKind.CONSUMER,
            start_s=claimed_s,
            attributes={
                **attributes,
                "penstock.attempt": delivery.attempt,
                "penstock.worker.id": self._worker_id,
                "penstock.tokens.input": len(job.prompt_token_ids),
                "penstock.tokens.resumed": running.num_resumed,
            },
            links=[_attempt_context(parent, job.job_id, number) for number in earlier],
            span_id=_attempt_span_id(job.job_id, delivery.attempt),
        )
        self._attempts[job.job_id, delivery.attempt] = _Attempt(span, unix_s)

    def first_token(self, running: RunningJob, times: RequestTimes | None) -> None:
        """Sends the spans up to a job's first token of this attempt, which has just come.

        Now, and not with the attempt's: a worker that dies later has sent them.
        """
        attempt = self._attempts.get((running.job.job_id, running.attempt))
        if attempt is None or running.first_token_s is None:
            return
        begun_s = running.begun_s
        if times is not None:
            begun_s = max(begun_s, running.first_token_s - times.prefill_s)
            self._part(attempt, "wait", running.begun_s, begun_s)
        cached = {"penstock.tokens.cached": running.cached_tokens or 0}
        self._part(attempt, "prefill", begun_s, running.first_token_s, cached)

    def ended(self, running: RunningJob, outcome: str) -> None:
        """Ends the span of an attempt, by whatever has become of it.

        That of one whose job another worker has is the other one's to send, with its decode.
        """
        attempt = self._attempts.pop((running.job.job_id, running.attempt), None)
        if attempt is None or outcome == AppendStatus.FENCED:
            return
        now_s = time.monotonic()
        num_tokens = running.num_tokens - running.num_resumed
        if running.first_token_s is not None:
            last_s = running.finished_s or now_s
            self._part(
                attempt,
                "decode",
                running.first_token_s,
                last_s,
                {"penstock.tokens.output": num_tokens},
            )
        attempt.span.set_attributes(
            {"penstock.outcome": outcome, "penstock.tokens.output": num_tokens}
        )
        if outcome not in _NO_FAULTS:
            fail_span(attempt.span, outcome)
        _end(attempt.span, now_s + attempt.unix_s)

    def _part(
        self,
        attempt: _Attempt,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
    ) -> None:
        span = self._tracing.begin(
            name,
            attempt.span.get_span_context(),
            start_s=start_s + attempt.unix_s,
            attributes=attributes,
        )
        _end(span, max(start_s, end_s) + attempt.unix_s)

    def _before(
        self,
        delivery: Delivery,
        parent: SpanContext,
        claimed_s: float,
        attributes: Attributes,
    ) -> None:
        """Sends the span of the time in the queue, or those of the attempt that the job was taken
        from."""
        lost, attempt = delivery.lost_claim, delivery.attempt
        if lost is None:
            waited_s = delivery.waited_s if attempt == 1 else delivery.requeued_s
            if waited_s is not None:
                span = self._tracing.begin(
                    "queue",
                    parent,
                    start_s=claimed_s - waited_s,
                    attributes={**attributes, "penstock.attempt": attempt},
                )
                _end(span, claimed_s)
        elif lost.worker_id != self._worker_id:
            self._lost(delivery, lost, parent, claimed_s, attributes)

    def _lost(
        self,
        delivery: Delivery,
        lost: LostClaim,
        parent: SpanContext,
        claimed_s: float,
        attributes: Attributes,
    ) -> None:
        """Sends the spans of an attempt whose worker was taken for dead, as far as the log has it.

        The time between its last tokens and the next claim belongs to its attempt: when it died is
        not known.
        """
        attempt = delivery.attempt - 1
        counts = {"penstock.tokens.input": len(delivery.job.prompt_token_ids)}
        if lost.num_resumed is not None:
            counts["penstock.tokens.resumed"] = lost.num_resumed
            counts["penstock.tokens.output"] = delivery.end.num_tokens - lost.num_resumed
        reported = {"penstock.reported_by": self._worker_id}
        span = self._tracing.begin(
            "attempt",
            parent,
            kind=SpanKind.CONSUMER,
            start_s=claimed_s - lost.age_s,
            attributes={
                **attributes,
                **counts,
                **reported,
                "penstock.attempt": attempt,
                "penstock.worker.id": lost.worker_id,
                "penstock.outcome": WORKER_LOST,
            },
            span_id=_attempt_span_id(delivery.job.job_id, attempt),
        )
        if lost.first_delta_age_s is not None and lost.last_delta_age_s is not None:
            output = {k: v for k, v in counts.items() if k == "penstock.tokens.output"}
            decode = self._tracing.begin(
                "decode",
                span.get_span_context(),
                start_s=claimed_s - lost.first_delta_age_s,
                attributes={**reported, **output},
            )
            fail_span(decode, WORKER_LOST)
            _end(decode, claimed_s - min(lost.first_delta_age_s, lost.last_delta_age_s))
        fail_span(span, WORKER_LOST)
        _end(span, claimed_s)


class _Attempt:
    """The span of an attempt that runs. `unix_s`: Unix time when the steady clock showed 0."""

    def __init__(self, span: Span, unix_s: float) -> None:
        self.span = span
        self.unix_s = unix_s


def _end(span: Span, end_s: float) -> None:
    """Ends a span at a Unix time."""
    span.end(round(end_s * 1e9))


def _attempt_span_id(job_id: str, attempt: int) -> int:
    """Returns the id of an attempt's span: the same in every process."""
    return xxhash.xxh64_intdigest(f"{job_id}/{attempt}".encode())


def _attempt_context(parent: SpanContext, job_id: str, attempt: int) -> SpanContext:
    return SpanContext(
        parent.trace_id,
        _attempt_span_id(job_id, attempt),
        is_remote=True,
        trace_flags=parent.trace_flags,
        trace_state=parent.trace_state,
    )
