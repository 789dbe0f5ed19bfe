"""HttpProtocol: uvicorn's, with bounds on a request's head and on a client that stops reading, an
error object for what is no HTTP, and streams for clients that have closed their side.

What ends here never reaches the application, so its middleware cannot name the answer.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import CallerError
from api.http.stalled_writes import StalledWrites
from api.sse import KEEPALIVE, json_bytes

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; what large cookies and tokens need
HEAD_TIMEOUT_S = 60.0  # from a connection's, or a head's, first moment to the head's end
# After a client has ended its side: when to write something, which fails once it has gone away.
PROBES_S = (0.0, 0.05, 0.2, 1.0, 3.0)
BEGIN_S = 1.0  # from a request to its answer, of which is not known before that it is a stream
_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It ends where more than MAX_HEAD_BYTES or HEAD_TIMEOUT_S go by without the end of a head, and
    when its client takes nothing of what there is for `write_timeout_s` seconds (0: never).
    """

    _head_bytes = 0  # of the head that is coming in
    _in_head = True  # nothing, or a part of a head, has come of the next request
    _muted = False  # the parser is being told about a head that it has seen
    _head_timer: asyncio.TimerHandle | None = None
    _is_half_closed = False  # the client says nothing any more, and may still read
    _is_event_stream = False  # the answer that has begun
    _asked_s = 0.0  # when the head of the request was complete
    _writes: StalledWrites
    _body: UnreadBody

    def __init__(self, *arguments: Any, write_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write_timeout_s = write_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writes = StalledWrites(self.loop, transport, self._write_timeout_s, self._stalled)
        self._body = UnreadBody(self.loop, transport.close)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._body.ends()
        self._writes.rest()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writes.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writes.rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # not only that of an earlier request
            self._body.answered()
        if self.transport.get_write_buffer_size():
            self._writes.watch()
        if self._is_half_closed:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that went away and one that only closed its side look the same, until something
        is written to them. Into an event stream a comment can be written: there the one who still
        reads is served. Whoever waits for anything else counts as gone."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.pipeline:
            return False
        self._is_half_closed = True
        self._probe(0)
        return True

    def data_received(self, data: bytes) -> None:
        """Feeds the parser. Bytes that it cannot take end the connection with an answer."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._body.came(wire_bytes=len(data))
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log.info("not HTTP", extra={"reason": type(error).__name__})
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    431,
                    "Request Header Fields Too Large",
                    f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.",
                    "headers_too_large",
                )
            elif self._body.is_mostly_framing():
                self.send_400_response("The body has more framing than content.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", msg, "invalid_http")

    # What the parser says.

    def on_message_begin(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._expect_head()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._muted:  # what comes behind a body has no meaning here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._end_head()
            self._asked_s = self.loop.time()
            self._body.begins()
            self._take_host_of_target()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body.came(body_bytes=len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        # A parser that sees an upgrade takes the head for the whole message.
        if not self.parser.should_upgrade():
            self._body.ends()
            super().on_message_complete()

    def _take_host_of_target(self) -> None:
        """Puts the host of an absolute-form target in the place of the header's: RFC 9112, 3.2.2.

        Raises HttpParserInvalidURLError.
        """
        if self.url.startswith(b"/"):
            return
        target = httptools.parse_url(self.url)
        if target.host is None:
            return
        host = b"[%s]" % target.host if b":" in target.host else target.host
        authority = host if target.port is None else b"%s:%d" % (host, target.port)
        self.headers[:] = [
            (name, authority if name == b"host" else value) for name, value in self.headers
        ]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        app = self._noting(app)
        if cycle.scope["http_version"] == "1.0":
            app = UntilClose(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError.

        Goes on after the wish for another protocol as if it had not been there, as HTTP allows. The
        JDK's client asks for h2c with its first request, body included. The parser would take that
        body for the other protocol's bytes: a new one is told how the body is framed.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._muted = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
            self._muted = False

    def _noting(self, app: ASGIApp) -> ASGIApp:
        """The application, of whose answer is noted whether it is an event stream."""

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            async def noting_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = message.get("headers", ())
                    kinds = (value for name, value in headers if name == b"content-type")
                    self._is_event_stream = next(kinds, b"").startswith(b"text/event-stream")
                await send(message)

            await app(scope, receive, noting_send)

        return noting

    def _probe(self, number: int) -> None:
        """Writes comments for a while; what the answer says later takes over."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if not cycle.response_started:
            wait_s = PROBES_S[1]
            if self.loop.time() + wait_s > self._asked_s + BEGIN_S:
                self.transport.close()
            else:
                self.loop.call_later(wait_s, self._probe, number)
            return
        if not self._is_event_stream:
            self.transport.close()
            return
        if not self.flow.write_paused:
            is_chunked = cycle.chunked_encoding
            frame = b"%x\r\n%s\r\n" % (len(KEEPALIVE), KEEPALIVE) if is_chunked else KEEPALIVE
            self.transport.write(frame)
        if number + 1 < len(PROBES_S):
            wait_s = PROBES_S[number + 1] - PROBES_S[number]
            self.loop.call_later(wait_s, self._probe, number + 1)

    def _stalled(self) -> None:
        log.info(
            "a client that stopped reading is cut off", extra={"limit_s": self._write_timeout_s}
        )
        self.transport.abort()

    def _expect_head(self) -> None:
        self._in_head = True
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _end_head(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        # An answer that is still being sent keeps its connection.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _refuse(self, status: int, phrase: str, message: str, code: str) -> None:
        """Answers, unless this request has an answer or a part of one already, and closes."""
        self._end_head()
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_started
        if is_answered and (self._body.is_coming or not cycle.response_complete):
            self.transport.close()
            return
        body = json_bytes(CallerError(message, status=status, code=code).body())
        head = (
            f"HTTP/1.1 {status} {phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: req-{uuid.uuid4().hex}\r\n"
            "connection: close\r\n"
            "\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


# UntilClose: bodies of unknown length for HTTP/1.0, which has no chunks: they end with the
# connection.


class Framing(Protocol):
    """What uvicorn's response cycle knows of the body's end."""

    chunked_encoding: bool | None
    expected_content_length: int


class UntilClose:
    """ASGI. The server closes an HTTP/1.0 connection after the answer anyway."""

    def __init__(self, app: ASGIApp, framing: Framing) -> None:
        self._app = app
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._framing.chunked_encoding = False
            else:
                self._framing.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unframed_send)


# UnreadBody: what a body may cost on the wire, and how long one may go on after its answer.

LINGER_S = 5.0  # for the rest of a body whose request has its answer already
MAX_FRAMING_BYTES = 64 * 1024  # chunk sizes, their extensions and trailers, beside ...
FRAMING_FACTOR = 8  # ... this many for each byte of the body: chunks of one byte have five


class UnreadBody:
    """One connection's. `late` is called when an answered request's body has not ended in time.

    A request that is refused early (too large, too late) has an answer before its body ends. What
    still comes is read and dropped for a while, so that the client gets to its answer; a body that
    goes on longer would otherwise go on for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self.is_coming = False
        self._loop = loop
        self._late = late
        self._wire_bytes = 0
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        """The head is complete: whatever comes now is body or framing."""
        self.is_coming = True
        self._wire_bytes = self._body_bytes = 0

    def came(self, wire_bytes: int = 0, body_bytes: int = 0) -> None:
        self._wire_bytes += wire_bytes
        self._body_bytes += body_bytes

    def ends(self) -> None:
        self.is_coming = False
        self._stop()

    def answered(self) -> None:
        """The request has its whole answer."""
        if self.is_coming and self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._late)

    def is_mostly_framing(self) -> bool:
        """More has come around the body than any honest client sends."""
        allowed = MAX_FRAMING_BYTES + FRAMING_FACTOR * self._body_bytes
        return self.is_coming and self._wire_bytes - self._body_bytes > allowed

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
