"""How a response reaches its client: as it is made, or told again from any event on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from starlette.types import Send

from api import sse
from api.answering import AnswerStream, GenerationResponse
from api.errors import ApiError
from api.frontend import Frontend
from api.job_stream import JobStream
from api.pieces import parts_of
from api.public_id import public_id
from api.responses.dialect import ResponseDialect
from api.tailing import TailResponse
from api.timing import Timing
from shared.messages import START, Delta, Failed, Finished, Job
from shared.transport.base import JobRecord


class ResponseAnswer(GenerationResponse):
    """A response from submit to its last byte."""

    def __init__(
        self, frontend: Frontend, job: Job, dialect: ResponseDialect, *, streamed: bool
    ) -> None:
        super().__init__(frontend, job, dialect, Timing(), streamed=streamed)
        self._response = dialect
        self._is_stored = bool(job.facts)

    def _last_payloads(self, event: Finished | Failed) -> Sequence[Any]:
        return _last_payloads(self._response, event)

    def _how_to_go_on(self, stream: AnswerStream) -> str:
        if not (self._streamed and self._is_stored):
            return super()._how_to_go_on(stream)
        return where_a_response_goes_on(stream.job_id, self._response.last_number)


class ResponseTail(TailResponse):
    """The events of a stored response after number `starting_after`, to its end.

    The log is read from its start: an event's number is known by counting alone.
    """

    def __init__(
        self,
        frontend: Frontend,
        record: JobRecord,
        dialect: ResponseDialect,
        starting_after: int | None,
    ) -> None:
        super().__init__(frontend, record, START)
        self._response = dialect
        self._last_made = self._last_written = -1  # the number of an event
        if starting_after is not None:
            dialect.num_known = starting_after + 1

    async def _tail(self, stream: JobStream, send: Send) -> None:
        opening = self._bytes(self._response.opening())
        self._last_written = self._response.last_number
        await (self._write_events(send, opening) if opening else self._keep_alive(send))
        while True:
            event = await stream.get(self._frontend.settings.keepalive_s)
            if event is None:
                await self._keep_alive(send)
            elif isinstance(event, Delta):
                async for piece in self._frontend.slices.pieces(self._events(event)):
                    self._last_written = self._last_made
                    if piece:
                        await self._write_events(send, piece)
            else:
                self._has_ended = True
                last = self._unknown(_last_payloads(self._response, event))
                parts = chain.from_iterable(map(sse.typed_event_pieces, last))
                async for piece in self._frontend.slices.pieces(parts):
                    await self._write_events(send, piece)
                await self._write_events(send, b"", more=False)
                return

    async def _say_error(self, send: Send, error: ApiError) -> None:
        said = sse.typed_event(self._response.failed(error))
        await self._write_events(send, said, more=False)

    def _how_to_go_on(self, stream: JobStream) -> str:
        return where_a_response_goes_on(stream.job_id, self._last_written)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        for part in parts_of(delta):
            for payload in self._response.delta(part):
                self._last_made = payload["sequence_number"]
                if self._last_made >= self._response.num_known:
                    yield sse.typed_event(payload)

    def _bytes(self, events: Sequence[Any]) -> bytes:
        return b"".join(map(sse.typed_event, self._unknown(events)))

    def _unknown(self, events: Sequence[Any]) -> Iterator[Any]:
        """Yields what the client does not have. An `error` has the number of the event before."""
        return (
            event
            for event in events
            if event["sequence_number"] >= self._response.num_known or event["type"] == "error"
        )


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


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
