"""JSON responses: short ones, long ones that are encoded in pieces while they are sent, and errors.

Errors have the shape of the route's dialect: Anthropic's routes have Anthropic's shape and its
status for an overload; all others have OpenAI's, of `ApiError.body`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, is_refusal
from api.http.caller import caller_in, note_refused, speaks_anthropic
from api.http.sse import json_bytes, json_pieces
from api.http.time_slices import TimeSlices

MEDIA_TYPE = "application/json"
OVERLOADED_STATUS = 529  # Anthropic's; everywhere else it is 503
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def json_response(
    payload: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with `payload` as one line of JSON. For payloads known to be short."""
    return Response(json_bytes(payload), status, headers, MEDIA_TYPE)


async def send_short(send: Send, response: Response) -> None:
    """Sends a complete body."""
    head = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


class LongJsonResponse(Response):
    """A response of any length, encoded and sent in pieces, without a content-length.

    `charge`: is exited when it is sent: what it takes from a pot.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        payload: Any,
        slices: TimeSlices,
        charge: AbstractContextManager[object] = nullcontext(),  # noqa: B008 (has no state)
    ) -> None:
        super().__init__()
        self._payload = payload
        self._slices = slices
        self._charge = charge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._charge:
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


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response to the request of `scope`."""
    if is_refusal(error):
        note_refused(scope)
    status, body = error.status, error.body()
    if speaks_anthropic(scope):
        status, body = anthropic_status(status), anthropic_body(error, caller_in(scope).request_id)
    return json_response(body, status, {**error.headers, "x-content-type-options": "nosniff"})


def anthropic_status(status: int) -> int:
    """Returns Anthropic's status for one of OpenAI's."""
    return OVERLOADED_STATUS if status == 503 else status


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the body of an error response, or of an `error` event.

    `details` has the code of the other dialects and the parameter at fault, if there are any.
    """
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    described: dict[str, Any] = {"type": kind, "message": error.message}
    details = {"error_code": error.code, "param": error.param}
    if any(details.values()):
        described["details"] = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": described, "request_id": request_id}
