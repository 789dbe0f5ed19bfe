"""The response of a generation: its jobs' events as a stream, or their whole answer as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Scope, Send

from api.errors import ApiError, job_failed
from api.generation.formatter import SHORT_BYTES, Formatter, PromptScores, Timing, delta_bytes
from api.http.json_response import error_response, json_response, send_json, send_short
from api.http.shares import Charge
from api.jobs.sent_events import SentEvents, is_short, split_long
from api.jobs.service import JobService
from api.jobs.sources import EventSource, EventStream, SubmittedJobs
from api.jobs.stream_response import EventStreamBody, StreamResponse
from shared.messages import Delta, Failed, Job


class JsonBody:
    """Sends one JSON object, or an error response in its place."""

    is_resumable = False

    def __init__(
        self, jobs: JobService, formatter: Formatter[Any], num_vector_bytes: int = 0
    ) -> None:
        self._slices = jobs.slices
        self._keepalive_s = jobs.keepalive_s
        self._answers = jobs.answers
        self._formatter = formatter
        self._num_vector_bytes = num_vector_bytes  # which the formatter will hold
        self._has_begun = False

    async def run(self, stream: EventStream, source: EventSource, send: Send) -> None:
        """Sends the object at the job's end. Raises StreamInterrupted and ApiError."""
        with self._answers.take(self._num_vector_bytes) as charge:
            await self._run(stream, source, send, charge)

    async def _run(
        self, stream: EventStream, source: EventSource, send: Send, charge: Charge
    ) -> None:
        num_bytes = 0  # collected since the answer was charged for the last time
        while True:
            event = await stream.get(self._keepalive_s)
            if isinstance(event, Delta):
                num_bytes += delta_bytes(event)
                if num_bytes > SHORT_BYTES:
                    charge.grow(num_bytes)
                    num_bytes = 0
                source.observe(event)
                if is_short(event):
                    self._formatter.collect(event)
                else:
                    await self._slices.run(map(self._formatter.collect, split_long(event)))
            elif event is not None:
                break
        source.observe_end(event)
        if isinstance(event, Failed):
            raise job_failed(event, delivered=False)
        payload = self._formatter.whole(event)

        async def sending(message: Message) -> None:
            self._has_begun = True
            await send(message)

        if source.is_small(event):
            await send_short(sending, json_response(payload))
        else:
            await send_json(sending, payload, self._slices)

    async def fail(self, error: ApiError, scope: Scope, send: Send) -> None:
        """Sends an error response, unless the object has started."""
        if not self._has_begun:
            self._has_begun = True
            await send_short(send, error_response(error, scope))

    def resume_hint(self, job_id: str) -> str:
        """Returns a sentence for a client whose request failed."""
        return "Try again."


def generation_response(
    jobs: JobService,
    submitted: Sequence[Job],
    formatter: Formatter[Any],
    timing: Timing,
    *,
    streamed: bool,
    stream_interval: int | None = None,
    prompts: Sequence[PromptScores | None] = (),
) -> StreamResponse:
    """Returns the response that submits a request's jobs and follows them to their end.

    `stream_interval`: tokens of a choice per event; None: an event per step. `prompts`: of each
    job that scores its prompt; filled before the formatter gets the first delta.
    """
    source = SubmittedJobs(jobs, submitted, timing, prompts)
    if streamed:
        events = SentEvents(formatter, stream_interval)
        beginning = events.beginning if formatter.has_beginning else None
        return StreamResponse(jobs, source, EventStreamBody(jobs, events, beginning))
    num_vector_bytes = sum(job.pooling.num_bytes for job in submitted if job.pooling is not None)
    return StreamResponse(jobs, source, JsonBody(jobs, formatter, num_vector_bytes))
