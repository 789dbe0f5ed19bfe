"""Error responses: every exception becomes one error object, on every route."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import (
    ApiError,
    ClientError,
    internal_error,
    invalid_parameter,
    queue_full,
    store_unreachable,
)
from api.http.error_format import error_response
from api.http.response_headers import set_rate_limit_headers
from shared.messages import InvalidParameter
from shared.transport.ports.jobs import QueueFull, TransportError

log = logging.getLogger(__name__)

_HTTP_MESSAGES = {
    404: ("Route not found.", "not_found"),
    405: ("Method not allowed.", "method_not_allowed"),
}


class ErrorResponsesMiddleware:
    """Pure ASGI. Turns exceptions into responses while nothing has been sent.

    An exception after that is raised on: streams send their own error events.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except Exception as error:
            if has_started:
                raise
            refusal = error_of(error)
            set_rate_limit_headers(scope, refusal.allowances)
            await error_response(refusal, scope)(scope, receive, send)


def error_of(error: Exception) -> ApiError:
    """Returns the error of an exception. Faults of the server are logged with their traceback."""
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            return invalid_parameter(error)
        case QueueFull():
            return queue_full(error)
        case TransportError():
            return store_unreachable(error)
        case _:
            log.error("request failed", exc_info=error)
            return internal_error()


def handle_framework_errors(app: FastAPI) -> None:
    """Replaces the framework's bodies for unknown routes and methods."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = _HTTP_MESSAGES.get(error.status_code, (str(error.detail), None))
        headers = dict(error.headers or {})
        refusal = ClientError(message, status=error.status_code, code=code, headers=headers)
        return error_response(refusal, request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        refusal = invalid_parameter(InvalidParameter(param, str(first["msg"])))
        return error_response(refusal, request.scope)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
