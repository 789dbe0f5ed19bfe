"""JSON responses: small ones in one piece, long ones encoded in pieces while they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.errors import ApiError
from api.http import sse
from api.http.error_format import error_response
from api.http.sse import json_bytes, json_pieces
from api.http.time_slices import TimeSlices

MEDIA_TYPE = "application/json"


def json_response(payload: Any, status: int = 200) -> Response:
    """Returns a response with `payload` as one line of JSON. For payloads known to be short."""
    return Response(json_bytes(payload), status_code=status, media_type=MEDIA_TYPE)


class LongJsonResponse(Response):
    """A response of any length, encoded and sent in pieces, without a content-length."""

    media_type = MEDIA_TYPE

    def __init__(self, payload: Any, slices: TimeSlices) -> None:
        super().__init__()
        self._payload = payload
        self._slices = slices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._payload, self._slices)


async def send_json(send: Send, payload: Any, slices: TimeSlices) -> None:
    """Sends a whole response with status 200, in chunks if it is not small.

    Yields to the event loop in between and waits for slow readers: at most one piece is held beside
    the payload.
    """
    headers = [(b"content-type", MEDIA_TYPE.encode())]
    has_begun = False
    piece = b""
    async for following in slices.pieces(json_pieces(payload)):
        if piece:
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                has_begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = following
    if not has_begun:
        headers.append((b"content-length", str(len(piece)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": piece, "more_body": False})


_JSON = ((b"content-type", b"application/json"),)


class WholeWriter:
    """Sends one JSON object. Until its first message an error can take its place."""

    def __init__(self, slices: TimeSlices) -> None:
        self.has_begun = False
        self._slices = slices

    async def write(self, send: Send, payload: Any, *, is_small: bool) -> None:
        """Sends `payload`: at once if it is small, else in pieces while it is encoded."""

        async def sending(message: Message) -> None:
            self.has_begun = True
            await send(message)

        if is_small:
            await _send_all(sending, 200, _JSON, sse.json_bytes(payload))
        else:
            await send_json(sending, payload, self._slices)

    async def write_error(self, error: ApiError, scope: Scope, send: Send) -> None:
        """Sends an error response."""
        self.has_begun = True
        response = error_response(error, scope)
        await _send_all(send, response.status_code, response.raw_headers, bytes(response.body))


async def _send_all(
    send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> None:
    length = (b"content-length", str(len(body)).encode())
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    await send({"type": "http.response.start", "status": status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
