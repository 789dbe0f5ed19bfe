"""Middleware for every request: errors as responses, limits of bodies, slashes of paths."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import (
    ApiError,
    ClientError,
    internal_error,
    invalid_parameter,
    queue_full,
    store_unreachable,
    unknown_parameter,
)
from api.http.json_response import error_response
from api.http.response_headers import set_rate_limit_headers
from shared.messages import InvalidParameter
from shared.transport.ports.jobs import QueueFull, TransportError

log = logging.getLogger(__name__)

_HTTP_MESSAGES = {
    404: ("Route not found.", "not_found"),
    405: ("Method not allowed.", "method_not_allowed"),
}
_SLASHED_ROUTES = "/v1/"
_ANTHROPIC_ROUTES = "/v1/messages"  # their clients add /v1 to the base URL
MAX_PATH_PARTS = 16
_NO_FIM = (
    "Fill-in-the-middle is not served. /v1/completions continues a prompt, without a suffix; a "
    "prompt with the model's own fill-in-the-middle tokens can be sent to it."
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_BYTE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # other bytes may be of UTF-8


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


def _allowed_methods(routers: Sequence[APIRouter], scope: Scope) -> str:
    """Returns the methods of all routes at a path: the framework names those of the first one."""
    known = (route for router in routers for route in router.routes)
    matching = [route for route in known if route.matches(scope)[0] is not Match.NONE]
    exact = [route for route in matching if getattr(route, "path", "") == scope["path"]]
    methods = {
        name
        for route in exact or matching
        if isinstance(route, Route)
        for name in route.methods or ()
    }
    return ", ".join(sorted(methods))


def _matches(routers: Sequence[APIRouter], scope: Scope, path: str) -> bool:
    meant = {**scope, "path": path}
    routes = (route for router in routers for route in router.routes)
    return any(route.matches(meant)[0] is not Match.NONE for route in routes)


def _not_found(routers: Sequence[APIRouter], request: Request) -> str:
    """Returns the message of an unknown route. Where it is a known one behind a wrong base URL
    (`/v1/v1/...`, no `/v1`, two slashes), it names the right one."""
    message = _HTTP_MESSAGES[404][0]
    parts = [part for part in request.url.path.split("/", MAX_PATH_PARTS) if part]
    if parts == ["v1", "fim", "completions"]:
        return f"{message} {_NO_FIM}"
    for first in range(len(parts)):
        if parts[0] == "v1" != parts[first] and set(parts[:first]) - {"v1"}:
            continue  # /v1/audio/completions: an API that is not served, below the right base URL
        rest = "/".join(parts[first:])
        for path in (f"/{rest}", f"/v1/{rest}"):
            if path != request.url.path and _matches(routers, request.scope, path):
                base = str(request.base_url).rstrip("/")
                if path.startswith("/v1/") and not path.startswith(_ANTHROPIC_ROUTES):
                    base += "/v1"
                return f"{message} The route is {path}: the client's base URL has to be {base}"
    return message


def _fault_of_query(details: Sequence[Any]) -> InvalidParameter:
    """Returns the error of a query: an unknown parameter, else the first that pydantic refused."""
    unknown = (detail for detail in details if detail["type"] == "extra_forbidden")
    detail = next(unknown, details[0])
    param = str(detail["loc"][1])
    if detail["type"] == "extra_forbidden":
        return unknown_parameter(param)
    message = str(detail["msg"]).replace("Input should be", "must be", 1)
    return InvalidParameter(param, message[:1].lower() + message[1:])


def handle_framework_errors(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Replaces the framework's bodies for unknown routes and methods, and for invalid queries."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = _HTTP_MESSAGES.get(error.status_code, (str(error.detail), None))
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 404:
            message = _not_found(routers, request)
        if error.status_code == 405:
            headers["allow"] = _allowed_methods(routers, request.scope)
        refusal = ClientError(message, status=error.status_code, code=code, headers=headers)
        return error_response(refusal, request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        refusal = invalid_parameter(_fault_of_query(error.errors()))
        return error_response(refusal, request.scope)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


class ControlCharactersMiddleware:
    """Pure ASGI, inside of the error responses and outside of everything that reads a path. Raises
    ClientError (400) for control characters in path, query or headers.

    No request needs one. Routes, their patterns and logs each read them in their own way: `$` of a
    pattern matches in front of a line break.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if _CONTROL.search(scope["path"]):
                raise _control_character("The path")
            if _CONTROL.search(unquote_plus(scope["query_string"].decode("latin-1"))):
                raise _control_character("The query")
            if any(_CONTROL_BYTE.search(value) for _, value in scope["headers"]):
                raise _control_character("A header")
        await self._app(scope, receive, send)


def _control_character(place: str) -> ClientError:
    return ClientError(
        f"{place} has a control character.", code="control_character", should_retry=False
    )


class BodyLimitMiddleware:
    """Pure ASGI. Raises ClientError (413) by the announced length, or while reading.

    `larger`: limits by (method, path) of routes that stream the body and never hold it whole.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, larger: Mapping[tuple[str, str], int] | None = None
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get((scope["method"], scope["path"]), self._max_bytes)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
            raise _too_large(max_bytes)
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
            return message

        await self._app(scope, counted_receive, send)


def _too_large(max_bytes: int) -> ClientError:
    return ClientError(
        f"The request body is larger than {max_bytes} bytes.",
        status=413,
        code="request_too_large",
    )


class TrailingSlashMiddleware:
    """Pure ASGI. Removes one slash from the end of a path below `/v1/`.

    No redirect: clients drop bodies and keys when they follow one. Outermost, so that access,
    limits and routes see one path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(_SLASHED_ROUTES) and path.endswith("/") and not path.endswith("//"):
            raw: bytes = scope.get("raw_path") or path.encode()
            scope = {**scope, "path": path[:-1], "raw_path": raw.removesuffix(b"/")}
        await self._app(scope, receive, send)
