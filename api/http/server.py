"""The server: uvicorn with a graceful shutdown, and with bounds on what one client can hold up.

uvicorn stops listening at the first signal. DrainingServer keeps listening: it responds 503 to
new requests and to the readiness probe, lets open responses finish for a while, ends the others
with an event that has the offset to resume from, and then stops.

uvicorn bounds neither the size of a head nor its time, keeps trailers without end, waits forever
for a client that stopped reading, loses the body of a request that offers an upgrade to HTTP/2, and
sends chunks to HTTP/1.0: docs/adr/0035 has a row for each. Responses that HttpProtocol makes do not
pass the application's middleware.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from api.errors import ClientError
from api.http.open_requests import OpenRequests
from api.http.sse import json_bytes
from api.settings import ApiSettings

log = logging.getLogger(__name__)

CUT_TIMEOUT_S = 5.0  # for the last events of responses that were cut
BACKLOG = 2048
KEEPALIVE_CONNECTION_S = 75  # of idle connections; longer than that of load balancers
GRACE_TICKS = 3  # of 0.1 s, in which a load balancer sees the readiness probe fail
MAX_HEAD_BYTES = 64 * 1024  # request line and headers; also trailers and the sizes of chunks
HEAD_TIMEOUT_S = 60.0  # from the start of a connection, or of a head, to the end of the head
LINGER_S = 5.0  # for the rest of a body whose request has its response already
WEBSOCKET_PATH = b"/v1/responses"
CHECKS = 8  # of a stalled write, in one limit
_FRAMING = (b"content-length", b"transfer-encoding")


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second ends at once."""

    def __init__(
        self, config: uvicorn.Config, open_requests: OpenRequests, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._open_requests = open_requests
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_draining = False
        self._cut_at_s: float | None = None
        self._is_cut = False
        self._ticks = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: sets flags for the next tick."""
        if self._is_draining:
            self.should_exit = True
        self._is_draining = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or (self._is_draining and self._has_drained())

    def _has_drained(self) -> bool:
        now_s = time.monotonic()
        if self._cut_at_s is None:
            self._open_requests.close("This frontend is shutting down. Try again.")
            self._cut_at_s = now_s + self._shutdown_timeout_s
            log.info(
                "draining: the frontend accepts no new requests",
                extra={"open_requests": len(self._open_requests)},
            )
        self._ticks += 1
        if not len(self._open_requests):
            return self._ticks > GRACE_TICKS
        if now_s < self._cut_at_s:
            return False
        if not self._is_cut:
            self._is_cut = True
            log.warning(
                "shutdown timeout expired; cutting open requests",
                extra={"open_requests": len(self._open_requests)},
            )
            self._open_requests.cut_all()
        return now_s > self._cut_at_s + CUT_TIMEOUT_S


def make_server(app: FastAPI, settings: ApiSettings) -> DrainingServer:
    """Returns a server for an app of `create_app`: `run` it, or `serve` on a running loop."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=partial(HttpProtocol, write_timeout_s=settings.write_timeout_s),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, write_timeout_s=settings.write_timeout_s),  # type: ignore[arg-type]
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # a message is bounded as it is sent
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # neither the client's address nor the scheme is used
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEPALIVE_CONNECTION_S,
        timeout_graceful_shutdown=int(CUT_TIMEOUT_S),
    )
    return DrainingServer(config, app.state.open_requests, settings.shutdown_timeout_s)


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
