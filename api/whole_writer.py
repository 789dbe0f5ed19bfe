"""WholeWriter: an answer that is not streamed, or the error in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Send

from api import sse
from api.errors import ApiError
from api.json_answer import send_json
from api.time_slices import TimeSlices

_JSON = ((b"content-type", b"application/json"),)


class WholeWriter:
    """Sends one JSON object. Until its first message an error can take its place."""

    def __init__(self, slices: TimeSlices) -> None:
        self.has_begun = False
        self._slices = slices

    async def write(self, send: Send, payload: Any, *, is_small: bool) -> None:
        """Sends `payload`: in one go where it is small, else in pieces while it is encoded."""

        async def sending(message: Message) -> None:
            self.has_begun = True
            await send(message)

        if is_small:
            await _send_all(sending, 200, _JSON, sse.json_bytes(payload))
        else:
            await send_json(sending, payload, self._slices)

    async def write_error(self, send: Send, error: ApiError) -> None:
        """Sends an ordinary error answer."""
        self.has_begun = True
        response = error.response()
        await _send_all(send, error.status, response.raw_headers, bytes(response.body))


async def _send_all(
    send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> None:
    length = (b"content-length", str(len(body)).encode())
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    await send({"type": "http.response.start", "status": status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
