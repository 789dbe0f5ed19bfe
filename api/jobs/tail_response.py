"""TailResponse: an existing job's events as SSE with ids, for any number of readers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import sse
from api.dialects.generate.formatter import tail_choice, tail_delta, tail_end, tail_error
from api.errors import ApiError, ServerError, going_down, job_failed, store_unreachable, unavailable
from api.http.open_requests import Ending
from api.jobs.delta_parts import parts_of, pieces_of
from api.jobs.event_stream import JobStream, StreamInterrupted
from api.jobs.reader_position import Diverged
from api.jobs.resume_point import AheadTrimmer, ResumePoint, where_to_go_on
from api.jobs.service import JobService
from api.jobs.stream_response import FAREWELL_S
from api.sse import EventWriter
from shared.messages import (
    TERMINAL_STATES,
    ChoiceDelta,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    OnDisconnect,
    segment_deltas,
)
from shared.transport.ports.jobs import JobRecord, TransportError

log = logging.getLogger(__name__)


class TailResponse(Response):
    """From a resume point to the end of the job.

    Leaving it cancels nothing. But it is a reader of the job: while it is there the job is no
    orphan, and where the last one that leaves begins a grace period, this one does too.

    There is an event for each piece, whoever reads and whenever: what a reader is told depends on
    the log alone, and on what it has ahead of its cursor. An event's id is the resume point behind
    it; the end has the id of the log's last entry.
    What is not the job's own end (an outage, this frontend going down) has none, so that a reader
    that comes back comes back to where it was.
    """

    def __init__(self, service: JobService, record: JobRecord, after: ResumePoint) -> None:
        super().__init__()
        self._service = service
        self._job_id = record.job_id
        self._after = after
        self._is_live = record.state not in TERMINAL_STATES
        self._policy = record.on_disconnect
        self._has_several = record.num_choices > 1
        self._reader_id = service.new_reader_id()
        self._has_ended = False
        self._token_ids: list[int] = []  # without text so far
        self._ahead = AheadTrimmer(after.ahead)
        self._made = self._written = after  # behind the last events that were made, and written
        self._event_writer = EventWriter(sse.KEEPALIVE, sse.BEHIND_KEEPALIVE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with service.open_requests.enter() as request:
            ending: Ending | None = None
            stream: JobStream | None = None
            try:
                stream = await self._open()
                await self._event_writer.begin(send)
                ending = await request.run(receive, lambda: self._work(stream, send))
                if ending is Ending.CUT:
                    with anyio.move_on_after(FAREWELL_S):
                        said = f"This frontend is going down. {self._how_to_go_on(stream)}"
                        await self._say_error(send, going_down(said))
            finally:
                with anyio.CancelScope(shield=True):
                    await self._leave(ending)
                    if stream is not None:
                        await stream.aclose()

    async def _open(self) -> JobStream:
        service = self._service
        try:
            if self._is_live:
                await service.store.attach([(self._job_id, self._reader_id)])
                service.departures.watch(self._job_id, self._reader_id, self._policy)
            return await service.relay.open(self._job_id, self._after.cursor)
        except TransportError as error:
            raise store_unreachable(error) from error

    async def _leave(self, ending: Ending | None) -> None:
        """One that was cut may go on at another frontend, while the lease of this one lasts."""
        departures = self._service.departures
        departures.unwatch(self._reader_id)
        has_grace = self._is_live and self._policy is OnDisconnect.GRACE
        if has_grace and not self._has_ended and ending is not Ending.CUT:
            await departures.left(self._job_id, self._reader_id, OnDisconnect.GRACE)

    async def _work(self, stream: JobStream, send: Send) -> None:
        try:
            await self._tail(stream, send)
        except StreamInterrupted:
            said = f"The job store went away. {self._how_to_go_on(stream)}"
            await self._say_error(send, unavailable(said))
        except Diverged as error:
            log.error("stream diverged", extra={"job_id": self._job_id, "detail": str(error)})
            await self._say_error(send, _diverged())
        except Exception:
            log.exception("tail failed", extra={"job_id": self._job_id})
            await self._say_error(send, ServerError("The server made a mistake. It was logged."))

    def _how_to_go_on(self, stream: JobStream) -> str:
        return where_to_go_on(stream.job_id, self._written)

    async def _tail(self, stream: JobStream, send: Send) -> None:
        await self._event_writer.keep_alive(send)
        while True:
            event = await stream.get(self._service.keepalive_s)
            if event is None:
                await self._event_writer.keep_alive(send)
            elif isinstance(event, Delta):
                async for piece in self._service.slices.pieces(self._events(event)):
                    if piece:
                        await self._event_writer.write(send, piece)
                        self._written = self._made  # a reader may be cut off before a write
                        self._event_writer.follow_id()
            else:
                self._has_ended = True
                await self._event_writer.write(send, self._last_event(event) + sse.DONE, more=False)
                return

    def _events(self, delta: Delta) -> Iterator[bytes]:
        """Yields an event for each segment, with an id of its own."""
        tells_choices = self._has_several and delta.segments is not None
        for part in parts_of(delta):  # a long one takes time to cut as well
            yield from self._choice_events(part) if tells_choices else self._text_events(part)

    def _text_events(self, delta: Delta) -> Iterator[bytes]:
        """Yields events for the pieces that have text."""
        for piece in pieces_of(delta):
            part = self._ahead.rest_of(ChoiceDelta(0, piece.token_ids, piece.text))
            if part is None:
                continue
            self._token_ids.extend(part.token_ids)
            if part.text:
                payload = tail_delta(part.text, self._token_ids)
                self._token_ids = []
                yield self._event(payload, piece.end)

    def _choice_events(self, delta: Delta) -> Iterator[bytes]:
        """Yields an event for each segment: a reader may come back in between."""
        cursor = delta.start
        for part in segment_deltas(delta):
            cursor = Cursor(
                cursor.num_tokens + len(part.token_ids), cursor.num_bytes + len(part.text.encode())
            )
            rest = self._ahead.rest_of(part)
            if rest is not None:
                yield self._event(tail_choice(rest), cursor)

    def _event(self, payload: dict[str, Any], cursor: Cursor) -> bytes:
        """Returns the event of `payload`, which ends at `cursor` of the log."""
        self._made = ResumePoint(cursor, self._ahead.left)
        return sse.event(payload, str(self._made))

    def _last_event(self, event: Finished | Failed) -> bytes:
        end_id = f"{event.end.num_tokens + 1}-0"
        if isinstance(event, Finished):
            return sse.event(tail_end(event, self._token_ids), end_id)
        error = job_failed(event, delivered=self._after != ResumePoint())
        is_durable = event.code != ErrorCode.STREAM_DIVERGED
        return sse.event(tail_error(error), end_id if is_durable else None)

    async def _say_error(self, send: Send, error: ApiError) -> None:
        await self._event_writer.write(send, sse.event(tail_error(error)) + sse.DONE, more=False)


def _diverged() -> ApiError:
    return ApiError(
        500,
        "The job's log does not continue what this reader has: its id is none of this stream.",
        kind="server_error",
        code=ErrorCode.STREAM_DIVERGED,
        should_retry=False,
    )
