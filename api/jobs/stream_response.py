"""GenerationResponse: one accepted request from submit to its last byte, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import (
    ApiError,
    ServerError,
    going_down,
    job_failed,
    store_unreachable,
    unavailable,
)
from api.generation.dialect import Dialect
from api.generation.prompt_logprobs import ScoredPrompt
from api.generation.response_size import is_small_answer
from api.generation.timing import Timing
from api.http.json_response import WholeWriter
from api.http.open_requests import Ending, OpenRequest
from api.http.response_headers import set_durability_header, set_rate_limit_headers
from api.jobs.delta_parts import is_short, parts_of
from api.jobs.event_source import AnswerStream
from api.jobs.event_stream import StreamInterrupted
from api.jobs.expected_job import take_expected
from api.jobs.resume_point import where_to_go_on
from api.jobs.sent_events import ToldEvents
from api.jobs.service import JobService
from api.sse import EventWriter
from shared.messages import START, Delta, Failed, Finished, Job
from shared.transport.ports.jobs import Submitted, TransportError

log = logging.getLogger(__name__)

FAREWELL_S = 2.0  # for last words and last duties when the answer is over


class GenerationResponse(Response):
    """An ASGI response that runs a job while its client is there.

    Until the job is accepted, errors are raised and become ordinary error answers. After that a
    stream says them as an event, and a whole answer, which has not begun yet, by its status.
    """

    def __init__(
        self,
        service: JobService,
        job: Job,
        dialect: Dialect,
        timing: Timing,
        *,
        streamed: bool,
        stream_interval: int | None = None,
        prompt: ScoredPrompt | None = None,
    ) -> None:
        """`stream_interval`: tokens of a choice to an event; None: each event as it comes. `prompt`
        is filled before the dialect gets the first event, where the job scores its own."""
        super().__init__()
        self._service = service
        self._job = job
        self._dialect = dialect
        self._timing = timing
        self._streamed = streamed
        self._prompt = prompt
        self._reader_id = service.new_reader_id()
        self._inter_token_s = service.metrics.inter_token_s.labels(job.kind)
        self._outcome = "interrupted"
        self._told = ToldEvents(dialect, stream_interval)
        framing = dialect.framing
        self._whole_writer = WholeWriter(service.slices)
        self._event_writer = EventWriter(framing.keepalive, framing.behind_keepalive)
        self._end: Finished | Failed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.open_requests.enter() as request:
            stream = await self._open(scope)
            set_durability_header(scope, self._job.durability)
            ending: Ending | None = None
            try:
                ending = await self._answer(request, stream, receive, send)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close(stream, ending)

    async def _open(self, scope: Scope) -> AnswerStream:
        job, service = self._job, self._service

        async def submit() -> Submitted:
            self._timing.submitted_s = time.monotonic()
            submission = await service.admission.submit(job, self._reader_id)
            set_rate_limit_headers(scope, submission.allowances)
            return submission.outcome

        try:
            resubmit = service.admission.resubmit_of(job, self._reader_id)
            expected = take_expected(scope, job.job_id)
            stream = await service.relay.open(
                job.job_id, START, submit, resubmit, self._prompt, expected=expected
            )
        except ApiError as error:
            self._count(f"refused_{error.status}")
            raise
        except TransportError as error:
            self._count("refused_503")
            raise store_unreachable(error) from error
        service.departures.watch(job.job_id, self._reader_id, job.on_disconnect)
        return stream

    async def _answer(
        self, request: OpenRequest, stream: AnswerStream, receive: Receive, send: Send
    ) -> Ending:
        async def work() -> None:
            try:
                if self._streamed:
                    await self._stream(stream, send)
                else:
                    await self._whole(stream, send)
            except StreamInterrupted:
                log.error("stream interrupted", extra={"job_id": self._job.job_id})
                message = f"The job store went away. {self._how_to_go_on(stream)}"
                await self._say_error(send, unavailable(message))
            except Exception:
                log.exception("answer failed", extra={"job_id": self._job.job_id})
                await self._say_error(
                    send, ServerError("The server made a mistake. It has been logged.")
                )

        try:
            ending = await request.run(receive, work)
        except asyncio.CancelledError:  # the server's own deadline for open connections
            with anyio.CancelScope(shield=True), anyio.move_on_after(FAREWELL_S):
                await self._say_cut(stream, send)
            raise
        if ending is Ending.CUT:
            with anyio.move_on_after(FAREWELL_S):
                await self._say_cut(stream, send)
        return ending

    async def _stream(self, stream: AnswerStream, send: Send) -> None:
        await self._event_writer.begin(send)
        async for piece in self._service.slices.pieces(self._told.opening()):
            await (self._write_told(send, piece) if piece else self._event_writer.keep_alive(send))
        while True:
            event = await stream.get(self._service.keepalive_s)
            if event is None:
                await self._event_writer.keep_alive(send)
            elif isinstance(event, Delta):
                self._observe(event)
                await self._tell(event, stream.num_waiting, send)
            else:
                self._timing.started_s = stream.started_s
                self._observe_end(event)
                await self._end_stream(event, send)
                return

    async def _tell(self, delta: Delta, num_waiting: int, send: Send) -> None:
        events, has_written = self._told.delta(delta, num_waiting), False
        if is_short(delta) and self._job.sampling.prompt_logprobs is None:
            if body := b"".join(events):
                await self._write_told(send, body)
                has_written = True
        else:
            async for body in self._service.slices.pieces(events):
                if body:
                    await self._write_told(send, body)
                    has_written = True
        if has_written:
            return
        if self._event_writer.silence_s >= self._service.keepalive_s:
            await self._event_writer.keep_alive(send)  # tokens come, and are held

    def _last_payloads(self, event: Finished | Failed) -> Sequence[Any]:
        if isinstance(event, Finished):
            return self._dialect.finished(event)
        delivered = self._timing.first_token_s is not None
        return (self._dialect.failed(job_failed(event, delivered=delivered)),)

    def _failed(self, error: ApiError) -> Any:
        """The last payload of a stream that ends before its job does."""
        return self._dialect.failed(error)

    async def _whole(self, stream: AnswerStream, send: Send) -> None:
        while True:
            event = await stream.get(self._service.keepalive_s)
            if isinstance(event, Delta):
                self._observe(event)
                if is_short(event):
                    self._dialect.collect(event)
                else:
                    await self._service.slices.run(map(self._dialect.collect, parts_of(event)))
            elif event is not None:
                break
        self._timing.started_s = stream.started_s
        self._observe_end(event)
        if isinstance(event, Failed):
            await self._whole_writer.write_error(send, job_failed(event, delivered=False))
            return

        is_small = is_small_answer(self._job, event)
        await self._whole_writer.write(send, self._dialect.whole(event), is_small=is_small)

    async def _say_cut(self, stream: AnswerStream, send: Send) -> None:
        self._outcome = "cut"
        message = f"This frontend is going down. {self._how_to_go_on(stream)}"
        await self._say_error(send, going_down(message))

    def _how_to_go_on(self, stream: AnswerStream) -> str:
        return (
            where_to_go_on(stream.job_id, self._told.resume_point)
            if self._streamed
            else "Try again."
        )

    async def _say_error(self, send: Send, error: ApiError) -> None:
        if not self._streamed:
            if not self._whole_writer.has_begun:
                await self._whole_writer.write_error(send, error)
            return
        if not self._event_writer.has_begun:
            await self._event_writer.begin(send)
        framing = self._dialect.framing
        last = framing.event(self._failed(error)) + framing.done
        await self._event_writer.write(send, last, more=False)

    async def _end_stream(self, end: Finished | Failed, send: Send) -> None:
        events = self._told.ending(end, self._last_payloads)
        last = b""
        if is_small_answer(self._job, end):
            last = b"".join(events)
        else:
            async for piece in self._service.slices.pieces(events):
                if piece:
                    await self._write_told(send, piece)
        await self._event_writer.write(send, last + self._dialect.framing.done, more=False)

    async def _write_told(self, send: Send, events: bytes) -> None:
        await self._event_writer.write(send, events)
        self._told.wrote()

    def _observe(self, delta: Delta) -> None:
        metrics = self._service.metrics
        metrics.generation_tokens.inc(len(delta.token_ids))
        gap_s = self._timing.token_came()
        if gap_s is not None:
            self._inter_token_s.observe(gap_s)
            return
        ttft_ms = self._timing.ttft_ms
        assert ttft_ms is not None
        metrics.ttft_s.labels(self._job.kind).observe(ttft_ms / 1000)

    def _observe_end(self, event: Finished | Failed) -> None:
        self._end = event
        metrics, kind = self._service.metrics, self._job.kind
        metrics.prompt_tokens.inc(len(self._job.prompt_token_ids))
        self._outcome = event.reason if isinstance(event, Finished) else event.state.value
        if isinstance(event, Finished):
            metrics.e2e_s.labels(kind).observe(time.monotonic() - self._timing.submitted_s)

    async def _close(self, stream: AnswerStream, ending: Ending | None) -> None:
        """The last duties, whatever happened: none of them raises."""
        service, job = self._service, self._job
        service.departures.unwatch(self._reader_id)
        if self._end is not None:
            await service.departures.delivered(job.job_id, self._reader_id)
        elif ending is Ending.LEFT:
            self._outcome = "disconnected"
            service.metrics.disconnects.labels(job.kind).inc()
            await service.departures.left(job.job_id, self._reader_id, job.on_disconnect)
        elif self._outcome != "cut" or not self._streamed:
            # Nobody can go on reading this answer: an outage, or a mistake of ours.
            await service.departures.left(job.job_id, self._reader_id, job.on_disconnect)
        # A stream that was cut keeps its job for as long as this frontend's lease lasts: its
        # reader may go on at another frontend.
        await stream.aclose()
        self._count(self._outcome)
        log.info(
            "answer ended",
            extra={"job_id": job.job_id, "kind": job.kind, "outcome": self._outcome},
        )

    def _count(self, outcome: str) -> None:
        self._service.metrics.requests.labels(self._job.kind, outcome).inc()
