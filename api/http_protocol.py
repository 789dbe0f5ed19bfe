"""HttpProtocol: uvicorn's, with bounds on a request's head and an error object for what is no HTTP.

What ends here never reaches the application, so its middleware cannot name the answer.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import CallerError
from api.sse import json_bytes
from api.until_close import UntilClose

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; what large cookies and tokens need
HEAD_TIMEOUT_S = 60.0  # from a connection's, or a head's, first moment to the head's end
_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It ends where more than MAX_HEAD_BYTES or HEAD_TIMEOUT_S go by without the end of a head.
    """

    _head_bytes = 0  # of the head that is coming in
    _in_head = True  # nothing, or a part of a head, has come of the next request
    _muted = False  # the parser is being told about a head that it has seen
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser. Bytes that it cannot take end the connection with an answer."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
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
        if not self._muted:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._end_head()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        # A parser that sees an upgrade takes the head for the whole message.
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
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
        """Answers, unless an answer is being sent already, and closes."""
        self._end_head()
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
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
