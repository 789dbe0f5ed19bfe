"""How a response reaches its client: as it is made, or told again from any event on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from starlette.types import Send

from api.dialects.responses.formatter import ResponseDialect
from api.errors import ApiError
from api.generation.timing import Timing
from api.ids import public_id
from api.jobs.delta_parts import parts_of
from api.jobs.event_source import AnswerStream
from api.jobs.event_stream import JobStream
from api.jobs.resume_point import ResumePoint
from api.jobs.service import JobService
from api.jobs.stream_response import GenerationResponse
from api.jobs.tail_response import TailResponse
from api.sse import TYPED, typed_event, whole_events
from shared.messages import Delta, Failed, Finished, Job
from shared.transport.ports.jobs import JobRecord


class ResponseAnswer(GenerationResponse):
    """A response from submit to its last byte."""

    def __init__(
        self, service: JobService, job: Job, dialect: ResponseDialect, *, streamed: bool
    ) -> None:
        super().__init__(service, job, dialect, Timing(), streamed=streamed)
        self._response = dialect
        self._is_stored = bool(job.facts)

    def _last_payloads(self, event: Finished | Failed) -> Sequence[Any]:
        return _last_payloads(self._response, event)

    def _how_to_go_on(self, stream: AnswerStream) -> str:
        if not (self._streamed and self._is_stored):
            return super()._how_to_go_on(stream)
        return where_a_response_goes_on(stream.job_id, self._last_written)

    def _failed(self, error: ApiError) -> Any:
        return _error_event(self._response, error, self._last_written)

    @property
    def _last_written(self) -> int:
        last = self._told.last_payload
        return -1 if last is None else int(last["sequence_number"])


class ResponseTail(TailResponse):
    """The events of a stored response after number `starting_after`, to its end.

    The log is read from its start: an event's number is known by counting alone.
    """

    def __init__(
        self,
        service: JobService,
        record: JobRecord,
        dialect: ResponseDialect,
        starting_after: int | None,
    ) -> None:
        super().__init__(service, record, ResumePoint())
        self._response = dialect
        if starting_after is not None:
            dialect.num_known = starting_after + 1
        self._last_made = self._last_written = dialect.num_known - 1  # numbers of events

    async def _tail(self, stream: JobStream, send: Send) -> None:
        opening = b"".join(self._unknown_events(self._response.opening()))
        await (self._write_made(send, opening) if opening else self._event_writer.keep_alive(send))
        while True:
            event = await stream.get(self._service.keepalive_s)
            if event is None:
                await self._event_writer.keep_alive(send)
            elif isinstance(event, Delta):
                payloads = chain.from_iterable(map(self._response.delta, parts_of(event)))
                async for piece in self._service.slices.pieces(self._unknown_events(payloads)):
                    await self._write_made(send, piece)
            else:
                self._has_ended = True
                last = self._unknown_events(_last_payloads(self._response, event), are_long=True)
                async for piece in self._service.slices.pieces(last):
                    await self._write_made(send, piece)
                await self._event_writer.write(send, b"", more=False)
                return

    async def _say_error(self, send: Send, error: ApiError) -> None:
        payload = _error_event(self._response, error, self._last_written)
        await self._event_writer.write(send, typed_event(payload), more=False)

    def _how_to_go_on(self, stream: JobStream) -> str:
        return where_a_response_goes_on(stream.job_id, self._last_written)

    async def _write_made(self, send: Send, events: bytes) -> None:
        if events:
            await self._event_writer.write(send, events)
            self._last_written = self._last_made

    def _unknown_events(
        self, payloads: Iterable[Any], *, are_long: bool = False
    ) -> Iterator[bytes]:
        """Yields the events that the client does not have, each as one, and nothing while a long
        one is made. An `error` has the number of the event before."""
        for payload in payloads:
            number = payload["sequence_number"]
            if number >= self._response.num_known or payload["type"] == "error":
                made = whole_events(TYPED, payload) if are_long else (typed_event(payload),)
                for event in made:
                    self._last_made = number if event else self._last_made
                    yield event


def _error_event(dialect: ResponseDialect, error: ApiError, last_written: int) -> Any:
    """Has the number of the last event that was written: its reader goes on behind it."""
    return {**dialect.failed(error), "sequence_number": max(0, last_written)}


def _last_payloads(dialect: ResponseDialect, event: Finished | Failed) -> Sequence[Any]:
    return dialect.finished(event) if isinstance(event, Finished) else dialect.ended(event)


def where_a_response_goes_on(job_id: str, last_number: int) -> str:
    """A sentence for a reader whose stream ends before the response does.

    `last_number`: of the last event that was written; -1 before the first.
    """
    response_id = public_id(ResponseDialect.kind, job_id)
    where = f"GET /v1/responses/{response_id}?stream=true"
    if last_number >= 0:
        where += f"&starting_after={last_number}"
    return f"{where} goes on from here."
