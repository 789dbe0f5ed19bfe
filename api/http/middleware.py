"""Middleware for every request: errors as responses, limits of bodies, slashes of paths."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

import anyio
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import MAX_ECHO_CHARS, ApiError, going_down, internal_error, store_unreachable
from api.http.json_response import error_response
from api.http.response_headers import set_rate_limit_headers
from api.ids import parse_job_id
from api.request_errors import ClientError, invalid_parameter, queue_full, unknown_parameter
from shared.keys import is_id
from shared.messages import InvalidParameter
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.batches import BATCH_PREFIX
from shared.transport.ports.files import FILE_PREFIX
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
# A parameter of a path -> whether a text can be such an id. Any text can name a model or a page.
_IDS: Mapping[str, Callable[[str], bool]] = {
    "name": lambda text: parse_job_id(text) is not None,
    "file_id": lambda text: is_id(text, FILE_PREFIX),
    "batch_id": lambda text: is_id(text, BATCH_PREFIX),
}
_SLASHED_ROUTES = "/v1/"
_ANTHROPIC_ROUTES = "/v1/messages"  # their clients add /v1 to the base URL
MAX_PATH_PARTS = 16
REFUSAL_S = 1.0  # for the answer to a request that is cut by the shutdown
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
        except asyncio.CancelledError:  # the server's last deadline: it would answer a bare 500
            if has_started:
                raise
            message = "This frontend is shutting down. Try again."
            with anyio.move_on_after(REFUSAL_S, shield=True):
                await error_response(going_down(message), scope)(scope, receive, send)
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
            log.error("a request failed with an unexpected error", exc_info=error)
            return internal_error()


def _routes_at(routers: Sequence[APIRouter], scope: Scope, path: str) -> list[Route]:
    """Returns the routes of any method at a path, of which one without parameters, or with the most
    parts, excludes the others: `/v1/jobs/cancel`, `/v1/models/{id}/pause`.
    A parameter that cannot be an id of its kind matches nothing: `/v1/responses/search`."""
    matching = []
    scope = {**scope, "path": path, "path_params": {}}
    for route in (route for router in routers for route in router.routes):
        match, matched = route.matches(scope)
        if isinstance(route, Route) and match is not Match.NONE:
            params = matched["path_params"]
            if all(_IDS[name](params[name]) for name in params.keys() & _IDS.keys()):
                matching.append(route)
    parts = max((route.path.count("/") for route in matching), default=0)
    return [route for route in matching if route.path == path] or [
        route for route in matching if route.path.count("/") == parts
    ]


def _allowed_methods(routers: Sequence[APIRouter], scope: Scope) -> str:
    """Returns the methods of all routes at a path: the framework names those of the first one."""
    routes = _routes_at(routers, scope, scope["path"])
    return ", ".join(sorted({name for route in routes for name in route.methods or ()}))


def _not_found(routers: Sequence[APIRouter], request: Request) -> str:
    """Returns the message of an unknown route. For a known one after a wrong base URL
    (`/v1/v1/...`, no `/v1`, two slashes), it names the right one."""
    message = f"Route not found: {request.method} {request.url.path[:MAX_ECHO_CHARS]}."
    parts = [part for part in request.url.path.split("/", MAX_PATH_PARTS) if part]
    if parts == ["v1", "fim", "completions"]:
        return f"{message} {_NO_FIM}"
    for first in range(len(parts)):
        if parts[0] == "v1" != parts[first] and set(parts[:first]) - {"v1"}:
            continue  # /v1/audio/completions: an API that is not served, below the right base URL
        rest = "/".join(parts[first:])
        for path in (f"/{rest}", f"/v1/{rest}"):
            if path != request.url.path and _routes_at(routers, request.scope, path):
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
        status, message = error.status_code, str(error.detail)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        headers.pop("allow", None)
        if status == 405:
            allowed = _allowed_methods(routers, request.scope)
            if allowed:
                headers["allow"] = allowed
                message = f"Method not allowed: {request.method}. This route has {allowed}."
            else:
                status = 404
        if status == 404:
            message = _not_found(routers, request)
        code = _HTTP_CODES.get(status)
        refusal = ClientError(message, status=status, code=code, headers=headers)
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
