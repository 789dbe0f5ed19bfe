"""StreamResponse: the one ASGI response of every dialect, for jobs from a source.

    enter -> open the source -> run the body while the client is there -> close the source

The source (api/jobs/sources.py) yields a job's events and decides what becomes of the job. The body
turns events into bytes: server-sent events, or one JSON object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, going_down, internal_error, unavailable
from api.http.open_requests import Ending
from api.http.sse import EventWriter, Framing
from api.http.time_slices import PIECE_BYTES
from api.jobs.event_stream import StreamInterrupted
from api.jobs.sent_events import is_short
from api.jobs.service import JobService
from api.jobs.sources import EventSource, EventStream
from api.on_demand import load_part
from shared.messages import Delta, Failed, Finished
from shared.outages import OF_STORE_OUTAGE
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

CACHED_TOKENS_WAIT_S = 0.5
CLOSE_GRACE_S = 2.0  # for the last event of a response that is cut


class StreamResponse(Response):
    """Runs a body over a source's events while the client is connected.

    Until the source is open, errors are raised and become ordinary error responses. After that a
    stream ends with an error event, and a JSON body that has not started with an error status.
    """

    def __init__(self, jobs: JobService, source: EventSource, body: Body) -> None:
        super().__init__()
        self._jobs = jobs
        self._source = source
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source, body = self._source, self._body
        with self._jobs.open_requests.enter() as request:
            stream = await source.open(scope)
            wants_recoveries = (b"penstock-events", b"recovery") in scope.get("headers", ())
            if wants_recoveries and body.is_resumable:  # only a stream takes them
                stream.recoveries = load_part("recoveries").Recoveries()
            ending: Ending | None = None
            try:
                ending = await request.run(receive, lambda: self._run(stream, scope, send))
                if ending is Ending.CUT:
                    await self._cut(scope, send)
            except ApiError as error:  # the request's key was revoked, or its body continues
                ending = Ending.LEFT
                await self._body.fail(error, scope, send)
            except asyncio.CancelledError:  # the server's own deadline for open connections
                if ending is None:
                    ending = Ending.CUT
                    with anyio.CancelScope(shield=True):
                        await self._cut(scope, send)
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await source.close(ending, is_resumable=body.is_resumable)

    async def _run(self, stream: EventStream, scope: Scope, send: Send) -> None:
        try:
            await self._body.run(stream, self._source, send)
        except StreamInterrupted:
            log.error(
                "a stream was interrupted: Redis was unavailable for too long",
                extra={"job_id": self._source.job_id},
            )
            message = f"The job store is unavailable. {self._resume_hint()}"
            await self._body.fail(unavailable(message), scope, send)
        except ApiError as error:
            await self._body.fail(error, scope, send)
        except Exception:
            log.exception(
                "a response failed with an unexpected error", extra={"job_id": self._source.job_id}
            )
            await self._body.fail(internal_error(), scope, send)

    async def _cut(self, scope: Scope, send: Send) -> None:
        """Sends the last event of a response that this frontend's shutdown ends."""
        with anyio.move_on_after(CLOSE_GRACE_S):
            message = f"This frontend is shutting down. {self._resume_hint()}"
            await self._body.fail(going_down(message), scope, send)

    def _resume_hint(self) -> str:
        hint = self._source.resume_hint if self._body.is_resumable else None
        return hint or self._body.resume_hint(self._source.job_id)


class Body(Protocol):
    """Turns a source's events into the bytes of a response."""

    is_resumable: bool  # a client that is cut off can continue elsewhere

    async def run(self, stream: EventStream, source: EventSource, send: Send) -> None:
        """Sends everything up to the job's end. Raises StreamInterrupted and ApiError."""
        ...

    async def fail(self, error: ApiError, scope: Scope, send: Send) -> None:
        """Ends the response with an error."""
        ...

    def resume_hint(self, job_id: str) -> str:
        """Returns a sentence for a client whose response ends before its job does."""
        ...


class EventEncoder(Protocol):
    """Events of a job as server-sent events.

    Each item is whole events, or empty where the next one is not complete: between any two items
    the stream may be cut.
    """

    framing: Framing
    has_ids: bool  # events have an `id:` line

    def opening(self) -> Iterator[bytes]:
        """Yields the events before any token."""
        ...

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        """Yields the events that a delta completes. `num_waiting`: unread events after it."""
        ...

    def ending(self, end: Finished | Failed, *, is_small: bool) -> Iterator[bytes]:
        """Yields the last events. One that is small is encoded in one go."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that ends before its job does."""
        ...

    def mark_sent(self) -> None:
        """Records that everything that was yielded has been sent."""
        ...

    def resume_hint(self, job_id: str) -> str:
        """Returns a sentence with the resume point after the events sent."""
        ...


class EventStreamBody:
    """Sends a source's events as server-sent events."""

    is_resumable = True  # a client that is cut off can continue elsewhere

    def __init__(
        self,
        jobs: JobService,
        encoder: EventEncoder,
        beginning: Callable[[int], Iterator[bytes]] | None = None,
    ) -> None:
        """`beginning` yields the events that wait for the job's cached tokens."""
        self._jobs = jobs
        self._slices = jobs.slices
        self._keepalive_s = jobs.keepalive_s
        self._encoder = encoder
        self._beginning = beginning
        framing = encoder.framing
        self._done = framing.done
        self._writer = EventWriter(framing.keepalive, framing.behind_keepalive)

    def resume_hint(self, job_id: str) -> str:
        """Returns a sentence that names where the client continues."""
        return self._encoder.resume_hint(job_id)

    async def run(self, stream: EventStream, source: EventSource, send: Send) -> None:
        """Sends everything up to the job's end. Raises StreamInterrupted and ApiError."""
        await self._writer.begin(send)
        async for events in self._slices.pieces(self._encoder.opening()):
            await (self._write(send, events) if events else self._keep_alive_if_silent(send))
        while True:
            event = await stream.get(self._keepalive_s)
            if self._beginning is not None and isinstance(event, Delta | Finished):
                begin, self._beginning = self._beginning, None
                cached_tokens = await self._cached_tokens(source.job_id, event)
                await self._write(send, b"".join(begin(cached_tokens)))
            if event is None and stream.recoveries:
                await self._writer.write(send, stream.recoveries.take())
            elif event is None:
                await self._writer.keep_alive(send)
            elif isinstance(event, Delta):
                event = await self._send_deltas(event, stream, source, send)
            if event is not None:
                source.observe_end(event)
                await self._end(event, source.is_small(event), send)
                return

    async def fail(self, error: ApiError, scope: Scope, send: Send) -> None:
        """Ends the stream with an error event."""
        if not self._writer.has_begun:
            await self._writer.begin(send)
        await self._writer.write(send, self._encoder.failed(error) + self._done, more=False)

    async def _cached_tokens(self, job_id: str, event: Delta | Finished) -> int:
        """Returns how many tokens of the prompt the cache had: the worker's first append, whose
        event has come, stored it. 0 where the store is away."""
        if isinstance(event, Finished):
            return event.usage.cached_tokens
        try:
            async with asyncio.timeout(CACHED_TOKENS_WAIT_S):  # tokens have come and wait for it
                record = await self._jobs.store.get(job_id)
        except (TransportError, TimeoutError) as error:
            # The stream continues: its tokens may arrive without Redis, and its end has the count.
            extra = {"job_id": job_id, "reason": str(error), **OF_STORE_OUTAGE}
            log.warning("cached tokens are unknown: the stream begins with 0", extra=extra)
            return 0
        return 0 if record is None else record.cached_tokens

    async def _send_deltas(
        self, delta: Delta, stream: EventStream, source: EventSource, send: Send
    ) -> Finished | Failed | None:
        """Sends a delta, and in the same write those that came while this task was busy.

        Nothing is waited for. Returns the end, where it came with them.
        """
        late: list[bytes] = []
        num_bytes = 0
        while is_short(delta) and not source.has_long_events:
            source.observe(delta)
            late.append(b"".join(self._encoder.delta(delta, stream.num_waiting)))
            num_bytes += len(late[-1])
            if not stream.num_waiting or num_bytes >= PIECE_BYTES:
                await self._write_late(send, late)
                return None
            try:
                event = await stream.get(0.0)
            except Exception:  # the deltas read so far go out before the error
                await self._write_late(send, late)
                raise
            if not isinstance(event, Delta):
                await self._write_late(send, late)
                return event
            delta = event
        await self._write_late(send, late)
        await self._send_long(delta, stream, source, send)
        return None

    async def _send_long(
        self, delta: Delta, stream: EventStream, source: EventSource, send: Send
    ) -> None:
        source.observe(delta)
        has_written = False
        async for piece in self._slices.pieces(self._encoder.delta(delta, stream.num_waiting)):
            if piece:
                await self._write(send, piece)
                has_written = True
        if not has_written:
            await self._keep_alive_if_silent(send)

    async def _write_late(self, send: Send, late: Sequence[bytes]) -> None:
        if joined := b"".join(late):
            await self._write(send, joined)
        else:
            await self._keep_alive_if_silent(send)

    async def _keep_alive_if_silent(self, send: Send) -> None:
        """Keeps the connection alive while tokens arrive and are held back."""
        if self._writer.silence_s >= self._keepalive_s:
            await self._writer.keep_alive(send)

    async def _end(self, end: Finished | Failed, is_small: bool, send: Send) -> None:
        events, last = self._encoder.ending(end, is_small=is_small), b""
        if is_small:
            last = b"".join(events)
        else:
            async for piece in self._slices.pieces(events):
                if piece:
                    await self._write(send, piece)
        await self._writer.write(send, last + self._done, more=False)

    async def _write(self, send: Send, events: bytes) -> None:
        await self._writer.write(send, events)
        self._encoder.mark_sent()
        if self._encoder.has_ids:
            self._writer.follow_id()
