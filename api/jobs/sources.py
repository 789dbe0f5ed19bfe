"""SubmittedJobs: the jobs of a request as the source of its response's events."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
from starlette.types import Scope

from api.errors import ApiError, store_unreachable
from api.generation.formatter import PromptScores, Timing, is_small_response
from api.http.caller import JobTrace, caller_in, job_trace_in
from api.http.open_requests import Ending
from api.jobs.event_stream import JobStream
from api.jobs.service import JobService
from api.on_demand import load_part
from shared.messages import (
    START,
    Delta,
    Durability,
    Failed,
    Finished,
    InvalidParameter,
    Job,
)
from shared.transport.ports.jobs import Submitted, TransportError

log = logging.getLogger(__name__)

Event = Delta | Finished | Failed


class EventStream(Protocol):
    """Events of a response: a JobStream, or several of them as a MergedStream."""

    recoveries: Any  # a part of JobStream's, for clients that ask

    @property
    def started_s(self) -> float | None:
        """Returns when a worker started, if that was received."""
        ...

    @property
    def num_waiting(self) -> int:
        """Returns how many events have arrived and were not read."""
        ...

    async def get(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None without one. Raises StreamInterrupted."""
        ...

    async def aclose(self) -> None: ...


class EventSource(Protocol):
    """Opens the events of a response, and decides what becomes of its jobs.

    `job_id` names the response. With `has_long_events` a short delta may make events of many
    kilobytes. `resume_hint`: a sentence that replaces the body's own.
    """

    job_id: str
    has_long_events: bool
    resume_hint: str | None

    async def open(self, scope: Scope) -> EventStream:
        """Raises ApiError; then nothing is left open."""
        ...

    def observe(self, delta: Delta) -> None:
        """Counts a delta that was received."""
        ...

    def observe_end(self, end: Finished | Failed) -> None:
        """Counts the end, which was received."""
        ...

    def is_small(self, end: Finished | Failed) -> bool:
        """Returns whether the end of the response can be encoded in one go."""
        ...

    async def close(self, ending: Ending | None, *, is_resumable: bool) -> None:
        """Decides what becomes of the jobs, and closes the stream. Never raises TransportError.

        `ending` is None when the response failed. `is_resumable`: a client that was cut off may go
        on reading at another frontend.
        """
        ...


def _refusal(error: BaseException) -> str:
    """Returns the outcome of a request whose jobs were not submitted."""
    if isinstance(error, ApiError):
        return f"refused_{error.status}"
    return "refused_400" if isinstance(error, InvalidParameter) else "interrupted"


class SubmittedJobs:
    """A source that submits a request's jobs: one, or one for each of several prompts.

    All are admitted or none. The first that fails ends the response and cancels the others.
    """

    def __init__(
        self,
        jobs: JobService,
        submitted: Sequence[Job],
        timing: Timing,
        prompts: Sequence[PromptScores | None] = (),
    ) -> None:
        """Takes jobs with the same number of choices. `prompts`: see `generation_response`."""
        first = submitted[0]
        self.job_id = first.job_id
        self.has_long_events = first.sampling.prompt_logprobs is not None
        self.resume_hint: str | None = None
        if len(submitted) > 1:
            self.resume_hint = "GET /v1/jobs/{id}/stream has the text of each of its jobs."
        self._jobs = jobs
        self._submitted = submitted
        self._prompts = prompts or [None] * len(submitted)
        self._reader_ids = [jobs.new_reader_id() for _ in submitted]
        self._timing = timing
        self._kind = first.kind
        self._model = first.model
        self._inter_token_s = jobs.metrics.inter_token_s.labels(first.kind, first.model)
        self._generation_tokens = jobs.metrics.generation_tokens.labels(first.model)
        self._stream: EventStream | None = None
        self._merged: Any = None  # the stream, where there are several jobs
        self._end: Finished | Failed | None = None
        self._trace: JobTrace | None = None

    async def open(self, scope: Scope) -> EventStream:
        """Submits the jobs. Raises ApiError; then nothing is left open."""
        self._trace = job_trace_in(scope)
        if self._trace is not None:
            self._trace.begin(self._submitted, caller_in(scope).request_id)
        streams: list[JobStream] = []
        try:
            for index in range(len(self._submitted)):
                streams.append(await self._open_one(scope, index))
            if len(streams) > 1:
                await self._jobs.admission.confirm(self._submitted)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._abandon(streams)
            self._count(_refusal(error))
            raise
        durability = self._submitted[0].durability
        if durability is not Durability.NONE:
            load_part("response_headers").set_durability_header(scope, durability)
        if len(streams) == 1:
            self._stream = streams[0]
        else:
            new_stream = load_part("merged_stream").MergedStream
            self._merged = self._stream = new_stream(streams, self._submitted[0].num_choices)
        return self._stream

    async def _open_one(self, scope: Scope, index: int) -> JobStream:
        jobs, job, reader_id = self._jobs, self._submitted[index], self._reader_ids[index]

        async def submit() -> Submitted:
            self._timing.submitted_s = time.monotonic()
            is_only = len(self._submitted) == 1  # several are confirmed together
            submission = await jobs.admission.submit(job, reader_id, confirms=is_only)
            if submission.allowances:
                load_part("response_headers").set_rate_limit_headers(scope, submission.allowances)
            return submission.outcome

        try:
            stream = await jobs.relay.open(
                job.job_id,
                START,
                submit,
                jobs.admission.resubmit_of(job, reader_id),
                self._prompts[index],
            )
        except TransportError as error:
            raise store_unreachable(error) from error
        jobs.disconnects.watch(job.job_id, reader_id, job.on_disconnect)
        return stream

    async def _abandon(self, streams: Sequence[JobStream]) -> None:
        """Cancels the jobs that were submitted, where one of them could not be."""
        for stream, reader_id in zip(streams, self._reader_ids, strict=False):
            self._jobs.disconnects.unwatch(reader_id)
            await self._jobs.disconnects.cancel(stream.job_id)
            await stream.aclose()

    def observe(self, delta: Delta) -> None:
        """Counts a delta that was received."""
        if not delta.token_ids and len(self._submitted) > 1:
            return  # the mere end of a choice
        self._generation_tokens.inc(len(delta.token_ids))
        gap_s = self._timing.token_came()
        if gap_s is not None:
            self._inter_token_s.observe(gap_s)
            return
        ttft_ms = self._timing.ttft_ms
        assert ttft_ms is not None
        num_prompt_tokens = len(self._submitted[0].prompt_token_ids)
        self._jobs.metrics.first_token(self._kind, self._model, num_prompt_tokens, ttft_ms / 1000)

    def observe_end(self, end: Finished | Failed) -> None:
        """Counts the end, which was received."""
        assert self._stream is not None
        self._end = end
        self._timing.started_s = self._stream.started_s
        if self._trace is not None:
            self._trace.end(self._model, end, self._timing.ttft_ms)
        metrics = self._jobs.metrics
        num_tokens = sum(len(job.prompt_token_ids) for job in self._submitted)
        metrics.prompt_tokens.labels(self._model).inc(num_tokens)
        if isinstance(end, Finished):
            e2e_s = time.monotonic() - self._timing.submitted_s
            metrics.e2e_s.labels(self._kind, self._model).observe(e2e_s)

    def is_small(self, end: Finished | Failed) -> bool:
        """Returns whether the end of the response can be encoded in one go."""
        return is_small_response(self._submitted[0], end)

    async def close(self, ending: Ending | None, *, is_resumable: bool) -> None:
        outcome = self._outcome(ending)
        if outcome == "disconnected":
            self._jobs.metrics.disconnects.labels(self._kind).inc()
        # Jobs of a cut stream continue for as long as this frontend's lease lasts. Without a
        # stream, or after an outage, no client can read on.
        keeps = ending is Ending.CUT and is_resumable
        for index in range(len(self._submitted)):
            await self._close_one(index, keeps=keeps)
        assert self._stream is not None
        await self._stream.aclose()
        self._count(outcome)
        if self._trace is not None:
            self._trace.close(str(outcome))
        extra: dict[str, object] = {"job_id": self.job_id, "kind": self._kind, "outcome": outcome}
        if len(self._submitted) > 1:
            extra["num_jobs"] = len(self._submitted)
        log.info("response ended", extra=extra)

    async def _close_one(self, index: int, *, keeps: bool) -> None:
        job, reader_id = self._submitted[index], self._reader_ids[index]
        disconnects = self._jobs.disconnects
        disconnects.unwatch(reader_id)
        is_over = self._end is not None
        if is_over if self._merged is None else self._merged.has_ended(index):
            await disconnects.delivered(job.job_id, reader_id)
        elif is_over:  # another one failed
            await disconnects.cancel(job.job_id)
        elif not keeps:
            await disconnects.left(job.job_id, reader_id, job.on_disconnect)

    def _outcome(self, ending: Ending | None) -> str:
        end = self._end
        if ending is Ending.CUT:
            return "cut"
        if end is not None:
            return end.reason if isinstance(end, Finished) else end.state.value
        return "disconnected" if ending is Ending.LEFT else "interrupted"

    def _count(self, outcome: str) -> None:
        self._jobs.metrics.requests.labels(self._kind, outcome).inc()
