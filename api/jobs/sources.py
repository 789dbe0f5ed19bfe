"""Sources of a StreamResponse: jobs that its request submits, or one that exists already."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

import anyio
from starlette.types import Scope

from api.errors import ApiError, store_unreachable
from api.generation.formatter import Timing
from api.generation.logprobs import ScoredPrompt
from api.generation.sampling import is_small_response
from api.http.caller import caller_in
from api.http.open_requests import Ending
from api.http.response_headers import set_durability_header, set_rate_limit_headers
from api.http.traces import span_in, trace_end, trace_generation
from api.jobs.event_stream import JobStream
from api.jobs.service import JobService
from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    InvalidParameter,
    Job,
    OnDisconnect,
    Segment,
    Usage,
)
from shared.tasks import cancel_and_wait
from shared.tracing import INVALID_SPAN, Span
from shared.transport.ports.jobs import JobRecord, Submitted, TransportError

log = logging.getLogger(__name__)

LOOK_S = 60.0  # of a merged stream: an empty look costs nothing

Event = Delta | Finished | Failed


class MergedStream:
    """Several jobs of one request, read as if they were one job with all their choices.

    Job number i's choice c is choice `i * num_choices + c` of the whole. Events of different jobs
    come in any order, each choice's own in theirs. It ends with one Finished when every job has
    finished, or with the first Failed. It owns the streams; not safe for several tasks.
    """

    def __init__(self, streams: Sequence[JobStream], num_choices: int) -> None:
        """Takes the streams of jobs with `num_choices` choices each."""
        self.job_id = streams[0].job_id
        self._streams = streams
        self._num_choices = num_choices
        self._ends: dict[int, Finished | Failed] = {}
        self._ready: deque[Event] = deque()
        # Bounded: a slow reader makes the streams wait, each of which bounds what it holds.
        self._arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(len(streams))
        self._readers = [
            asyncio.create_task(self._read(index, stream)) for index, stream in enumerate(streams)
        ]

    @property
    def started_s(self) -> float | None:
        """Returns when a worker began the first of the jobs, if that was received."""
        known = [stream.started_s for stream in self._streams if stream.started_s is not None]
        return min(known, default=None)

    @property
    def num_waiting(self) -> int:
        """Returns how many events are here and were not read."""
        return len(self._ready) + self._arrived.qsize()

    def has_ended(self, index: int) -> bool:
        """Returns whether that job has ended for the reader."""
        return index in self._ends

    async def get(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when there is none within `timeout_s`.

        Raises StreamInterrupted, and what else one of the streams raised.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready:
                    index, arrived = await self._arrived.get()
                    if isinstance(arrived, Exception):
                        raise arrived
                    self._take(index, arrived)
        except TimeoutError:
            return None
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Closes all streams. Idempotent; cancels no job."""
        await cancel_and_wait(*self._readers)
        for stream in self._streams:
            await stream.aclose()

    async def _read(self, index: int, stream: JobStream) -> None:
        try:
            while not stream.ended:
                event = await stream.get(LOOK_S)
                if event is not None:
                    await self._arrived.put((index, event))
        except Exception as error:  # raised where the events are read
            await self._arrived.put((index, error))

    def _take(self, index: int, event: Event) -> None:
        first = index * self._num_choices
        if isinstance(event, Delta):
            self._ready.append(_renumbered(event, first))
            return
        self._ends[index] = event
        if isinstance(event, Failed):
            self._ready.append(event)
            return
        if self._num_choices == 1:  # its job's end is the choice's
            ending = (Segment(first, 0, 0, event.reason, event.stop_reason),)
            self._ready.append(Delta(event.end, event.end, (), "", None, ending))
        if len(self._ends) == len(self._streams):
            self._ready.append(_all_finished(list(self._ends.values())))


def _renumbered(delta: Delta, first: int) -> Delta:
    segments = delta.segments
    if segments is None:
        num_bytes = delta.end.num_bytes - delta.start.num_bytes
        segments = (Segment(0, len(delta.token_ids), num_bytes),)
    moved = tuple(segment._replace(choice=first + segment.choice) for segment in segments)
    return delta._replace(segments=moved)


def _all_finished(ends: Sequence[Finished | Failed]) -> Finished:
    """Returns one end of all jobs: LENGTH when any was cut, with the sums of the token counts."""
    reasons = {end.reason for end in ends if isinstance(end, Finished)}
    return Finished(
        end=Cursor(sum(end.end.num_tokens for end in ends), sum(end.end.num_bytes for end in ends)),
        reason=FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP,
        usage=Usage(
            sum(end.usage.prompt_tokens for end in ends),
            sum(end.usage.completion_tokens for end in ends),
            sum(end.usage.cached_tokens for end in ends),
        ),
    )


EventStream = JobStream | MergedStream


def _refusal(error: BaseException) -> str:
    """Returns the outcome of a request whose jobs were not submitted."""
    if isinstance(error, ApiError):
        return f"refused_{error.status}"
    return "refused_400" if isinstance(error, InvalidParameter) else "interrupted"


class SubmittedJobs:
    """A source that submits a request's jobs: one, or one for each of several prompts.

    All are admitted or none. The first that fails ends the response and cancels the others.
    `job_id` names the response. With `has_long_events` a short delta may make events of many
    kilobytes. `resume_hint`: a sentence in place of the body's own.
    """

    def __init__(
        self,
        jobs: JobService,
        submitted: Sequence[Job],
        timing: Timing,
        prompts: Sequence[ScoredPrompt | None] = (),
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
        self._end: Finished | Failed | None = None
        self._span: Span = INVALID_SPAN

    async def open(self, scope: Scope) -> EventStream:
        """Submits the jobs. Raises ApiError; then nothing is left open."""
        self._span = span_in(scope)
        if self._span.is_recording():
            trace_generation(self._span, self._submitted, caller_in(scope).request_id)
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
        set_durability_header(scope, self._submitted[0].durability)
        if len(streams) == 1:
            self._stream = streams[0]
        else:
            self._stream = MergedStream(streams, self._submitted[0].num_choices)
        return self._stream

    async def _open_one(self, scope: Scope, index: int) -> JobStream:
        jobs, job, reader_id = self._jobs, self._submitted[index], self._reader_ids[index]

        async def submit() -> Submitted:
            self._timing.submitted_s = time.monotonic()
            is_only = len(self._submitted) == 1  # several are confirmed together
            submission = await jobs.admission.submit(job, reader_id, confirms=is_only)
            set_rate_limit_headers(scope, submission.allowances)
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
        self._jobs.metrics.ttft_s.labels(self._kind, self._model).observe(ttft_ms / 1000)

    def observe_end(self, end: Finished | Failed) -> None:
        """Counts the end, which was received."""
        assert self._stream is not None
        self._end = end
        self._timing.started_s = self._stream.started_s
        trace_end(self._span, self._model, end, self._timing.ttft_ms)
        metrics = self._jobs.metrics
        num_tokens = sum(len(job.prompt_token_ids) for job in self._submitted)
        metrics.prompt_tokens.labels(self._model).inc(num_tokens)
        if isinstance(end, Finished):
            e2e_s = time.monotonic() - self._timing.submitted_s
            metrics.e2e_s.labels(self._kind, self._model).observe(e2e_s)

    def is_small(self, end: Finished | Failed) -> bool:
        """Returns whether what a response sends at the end can be encoded in one go."""
        return is_small_response(self._submitted[0], end)

    async def close(self, ending: Ending | None, *, is_resumable: bool) -> None:
        """Settles what becomes of the jobs, and closes the stream. Never raises TransportError.

        `ending` is None when the response failed. `is_resumable`: a client that was cut off may go
        on reading at another frontend.
        """
        outcome = self._outcome(ending)
        if outcome == "disconnected":
            self._jobs.metrics.disconnects.labels(self._kind).inc()
        # Jobs of a stream that was cut go on for as long as this frontend's lease lasts. Without a
        # stream, or after an outage, no client can read on.
        keeps = ending is Ending.CUT and is_resumable
        for index in range(len(self._submitted)):
            await self._close_one(index, keeps=keeps)
        assert self._stream is not None
        await self._stream.aclose()
        self._count(outcome)
        if self._span.is_recording():
            self._span.set_attribute("penstock.outcome", str(outcome))
        extra: dict[str, object] = {"job_id": self.job_id, "kind": self._kind, "outcome": outcome}
        if len(self._submitted) > 1:
            extra["num_jobs"] = len(self._submitted)
        log.info("response ended", extra=extra)

    async def _close_one(self, index: int, *, keeps: bool) -> None:
        job, reader_id = self._submitted[index], self._reader_ids[index]
        disconnects, stream = self._jobs.disconnects, self._stream
        disconnects.unwatch(reader_id)
        is_over = self._end is not None
        if stream.has_ended(index) if isinstance(stream, MergedStream) else is_over:
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


class AttachedJob:
    """A source that follows a job that was submitted before, from a cursor of its log on.

    Leaving it cancels nothing. But it is a reader of the job: while it is there the job is no
    orphan, and where the last reader's leaving begins a grace period, its leaving does too.
    """

    has_long_events = True
    resume_hint: str | None = None

    def __init__(
        self,
        jobs: JobService,
        record: JobRecord,
        after: Cursor = START,
        *,
        has_short_end: bool = False,
    ) -> None:
        """Takes the job's record. `has_short_end`: the last event does not repeat the output."""
        self._has_short_end = has_short_end
        self.job_id = record.job_id
        self._jobs = jobs
        self._after = after
        self._policy = record.on_disconnect
        self._is_live = record.state not in TERMINAL_STATES
        self._reader_id = jobs.new_reader_id()
        self._stream: JobStream | None = None
        self._has_ended = False

    async def open(self, scope: Scope) -> JobStream:
        jobs, reader = self._jobs, (self.job_id, self._reader_id)
        try:
            if self._is_live:
                await jobs.store.attach([reader])
                jobs.disconnects.watch(*reader, self._policy)
            self._stream = await jobs.relay.open(self.job_id, self._after)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close(None, is_resumable=True)
            if isinstance(error, TransportError):
                raise store_unreachable(error) from error
            raise
        return self._stream

    def observe(self, delta: Delta) -> None:
        """Does nothing: the response that submitted the job counts it."""

    def observe_end(self, end: Finished | Failed) -> None:
        self._has_ended = True

    def is_small(self, end: Finished | Failed) -> bool:
        return self._has_short_end

    async def close(self, ending: Ending | None, *, is_resumable: bool) -> None:
        disconnects = self._jobs.disconnects
        disconnects.unwatch(self._reader_id)
        has_grace = self._is_live and self._policy is OnDisconnect.GRACE
        if has_grace and not self._has_ended and ending is not Ending.CUT:
            await disconnects.left(self.job_id, self._reader_id, OnDisconnect.GRACE)
        if self._stream is not None:
            await self._stream.aclose()


EventSource = SubmittedJobs | AttachedJob
