"""Errors as the Messages dialect says them, from those of the rest of the house."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.caller import caller_in
from api.http.response_headers import speaks_anthropic
from api.sse import json_bytes

OVERLOADED_STATUS = 529  # of this dialect; everywhere else the same is 503

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def error_status(status: int) -> int:
    """The HTTP status that this dialect has for one of ours."""
    return OVERLOADED_STATUS if status == 503 else status


def error_payload(
    status: int, message: str, code: str | None, param: str | None, request_id: str
) -> dict[str, Any]:
    """The body of an error answer, or of an `error` event; `status` is ours.

    `details` has, as far as there are any, the code that the other dialects have and the member
    that is at fault.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    details = {"error_code": code, "param": param}
    if any(details.values()):
        error["details"] = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": error, "request_id": request_id}


# AnthropicAnswersMiddleware: on its routes every answer has the dialect's headers and errors.


class AnthropicAnswersMiddleware:
    """Pure ASGI. Stands outside of the error answers and says each again in its dialect.

    Doing it here, on the way out, means that no route, middleware or limit has to know of a second
    shape. An event stream goes through untouched: its dialect says its own errors.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not speaks_anthropic(scope):
            await self._app(scope, receive, send)
            return
        held: Message | None = None  # the beginning of an error answer
        body = b""

        async def translated_send(message: Message) -> None:
            nonlocal held, body
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = caller_in(scope).request_id
                if message["status"] >= 400:
                    held = message
                    return
            elif held is not None:
                body += message.get("body", b"")
                if message.get("more_body", False):
                    return
                start, body = _translated(held, body, caller_in(scope).request_id)
                held = None
                await send(start)
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, translated_send)


def _translated(start: Message, body: bytes, request_id: str) -> tuple[Message, bytes]:
    error = _error_of(body)
    if error is None:  # a HEAD's, for example
        return start, body
    status: int = start["status"]
    message, code, param = str(error.get("message")), error.get("code"), error.get("param")
    payload = error_payload(status, message, code, param, request_id)
    translated = json_bytes(payload)
    started = {**start, "status": error_status(status), "headers": list(start["headers"])}
    MutableHeaders(scope=started)["content-length"] = str(len(translated))
    return started, translated


def _error_of(body: bytes) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else None
