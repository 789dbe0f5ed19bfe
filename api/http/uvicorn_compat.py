"""uvicorn's protocols with bounds on what one client can hold up.

uvicorn bounds neither the size of a head nor its time, keeps trailers without end, waits forever
for a client that stopped reading, loses the body of a request that offers an upgrade to
HTTP/2, and sends chunks to HTTP/1.0: docs/adr/0035 has a row for each. Responses that HttpProtocol
makes do not pass the application's middleware.

Only this module overrides and uses interfaces of uvicorn that are not public; USES names them all.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from api.http.sse import json_bytes
from api.request_errors import ClientError
from shared.compat import check_library

log = logging.getLogger(__name__)

TRIED = "uvicorn>=0.34,<0.55"
USES: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        *("connection_made", "connection_lost", "pause_writing", "resume_writing"),
        *("data_received", "on_message_begin", "on_url", "on_header", "on_headers_complete"),
        *("on_body", "on_message_complete", "on_response_complete", "send_400_response"),
        *("_start_asgi_task", "_should_upgrade", "_unset_keepalive_if_required"),
        *("handle_websocket_upgrade", "loop", "transport", "parser", "headers", "scope", "url"),
        "cycle",
    ),
    RequestResponseCycle: (
        *("scope", "response_started", "response_complete"),
        *("chunked_encoding", "expected_content_length"),
    ),
    WebSocketsSansIOProtocol: (
        *("connection_made", "connection_lost", "pause_writing", "resume_writing", "send"),
        *("loop", "transport", "initial_response", "close_sent", "handshake_complete"),
    ),
    uvicorn.Server: ("handle_exit", "on_tick", "should_exit"),
}

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; also trailers and the sizes of chunks
HEAD_TIMEOUT_S = 60.0  # from the start of a connection, or of a head, to the end of the head
LINGER_S = 5.0  # for the rest of a body whose request has its response already
WEBSOCKET_PATH = b"/v1/responses"
CHECKS = 8  # of a stalled write, in one limit
_FRAMING = (b"content-length", b"transfer-encoding")


def check_uvicorn() -> None:
    """Raises IncompatibleLibrary if the installed uvicorn lacks an interface used here."""
    check_library(TRIED, USES)


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It ends when MAX_HEAD_BYTES or HEAD_TIMEOUT_S pass without the end of a head, when LINGER_S pass
    without the end of a body that is not needed any more, and when the client takes no byte of its
    response for `write_timeout_s` seconds (0: never).
    """

    _in_head = True  # no request, or a part of a head, has been received
    _num_unframed = 0  # bytes received since the last byte of a body or the end of a head
    _is_body_complete = True
    _muted = False  # the parser is fed a head that the application has already
    _deadline: asyncio.TimerHandle | None = None
    _writes: StalledWrites

    def __init__(self, *arguments: Any, write_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write_timeout_s = write_timeout_s

    # asyncio's callbacks.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writes = StalledWrites(self.loop, transport, self._write_timeout_s, self._stalled)
        self._set_deadline(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._writes.rest()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writes.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writes.rest()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser. Bytes that it cannot read end the connection with an error response."""
        if self.transport.is_closing():
            return
        self._num_unframed += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log.info("a connection sent invalid HTTP", extra={"reason": type(error).__name__})
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._num_unframed <= MAX_HEAD_BYTES:
                return
            if self._in_head:
                message = f"The request's headers are larger than {MAX_HEAD_BYTES} bytes."
                phrase = "Request Header Fields Too Large"
                self._refuse(431, phrase, message, "headers_too_large")
            else:
                self.send_400_response("The trailers or chunk sizes of the body are too large.")

    def _feed(self, data: bytes) -> None:
        """Feeds the parser; ignores an offer to upgrade, as HTTP allows. Raises HttpParserError.

        Java's HttpClient and `curl --http2` offer h2c with their first request, body included. The
        parser takes that body for bytes of the other protocol; so a new one is fed the framing of
        the body, and then the body.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._should_upgrade():
                    self._clear_deadline()
                    self._writes.rest()
                    self.handle_websocket_upgrade()
                    return
                data = data[upgrade.args[0] :]
            framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._muted = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
            self._muted = False

    def _should_upgrade(self) -> bool:
        is_served = self.url.partition(b"?")[0].rstrip(b"/") == WEBSOCKET_PATH
        is_get = self.scope["method"] == "GET"
        return is_served and is_get and super()._should_upgrade()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._in_head = True
            self._set_deadline(HEAD_TIMEOUT_S)
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._muted:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._in_head = self._is_body_complete = False
            self._num_unframed = 0
            self._clear_deadline()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body follows, see `_feed`
            self._is_body_complete = True
            self._clear_deadline()
            super().on_message_complete()

    # uvicorn's callbacks.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The rest of a body that was refused is read for a while: a connection that is closed with
        # bytes to read is reset, and the client may lose the response.
        if not self._is_body_complete and self._is_idle():
            self._set_deadline(LINGER_S)
        if self.transport.get_write_buffer_size():
            self._writes.watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", msg, "invalid_http")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _until_close(app, cycle)
        super()._start_asgi_task(cycle, app)

    # Bounds.

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._deadline_passed)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        if self._is_idle():  # a response that is being sent keeps its connection
            self.transport.close()

    def _stalled(self) -> None:
        log.info(
            "a client stopped reading; closing its connection",
            extra={"limit_s": self._write_timeout_s},
        )
        self.transport.abort()

    def _refuse(self, status: int, phrase: str, message: str, code: str) -> None:
        """Closes the connection, with an error response unless this request has started its own."""
        self._clear_deadline()
        is_answered = self.cycle is not None and self.cycle.response_started
        if is_answered and not (self._is_body_complete and self._is_idle()):
            self.transport.close()
            return
        body = json_bytes(ClientError(message, status=status, code=code).body())
        head = (
            f"HTTP/1.1 {status} {phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: req-{uuid.uuid4().hex}\r\n"
            "x-content-type-options: nosniff\r\n"
            "connection: close\r\n"
            "\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. It ends when the client takes no byte for `write_timeout_s` seconds (0:
    never); a client that does not respond to pings is found earlier."""

    _writes: StalledWrites

    def __init__(self, *arguments: Any, write_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write_timeout_s = write_timeout_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        abort = self.transport.abort
        self._writes = StalledWrites(self.loop, self.transport, self._write_timeout_s, abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writes.rest()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writes.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writes.rest()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # refused, else uvicorn logs that nothing came


def _until_close(app: ASGIApp, cycle: Any) -> ASGIApp:
    """Returns the application without chunks: in HTTP/1.0 the end of the connection ends a body."""

    async def unframed(scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unframed_send)

    return unframed


class StalledWrites:
    """Calls `on_stall` when the client of one connection reads nothing for `limit_s` (0: never).

    At most an eighth of the limit late. What the client does not read fills its buffers and then
    the server's; TCP keeps such a connection for as long as the client's kernel responds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.WriteTransport,
        limit_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self._taken_s = 0.0

    def watch(self) -> None:
        """Starts while bytes wait for the client. Idempotent."""
        if self._timer is None and self._limit_s > 0:
            self._num_bytes = self._transport.get_write_buffer_size()
            self._taken_s = self._loop.time()
            self._check_later()

    def rest(self) -> None:
        """Stops: the client has read enough. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        before, self._num_bytes = self._num_bytes, self._transport.get_write_buffer_size()
        if not self._num_bytes:
            return
        now_s = self._loop.time()
        if self._num_bytes < before:
            self._taken_s = now_s
        if now_s - self._taken_s >= self._limit_s:
            self._on_stall()
        else:
            self._check_later()
