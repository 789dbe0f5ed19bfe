"""Middleware for every request: the limit of its body, and the slash at the end of its path."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ClientError


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


_ROUTES = "/v1/"


class TrailingSlashMiddleware:
    """Pure ASGI. Removes one slash from the end of a path below `/v1/`.

    No redirect: clients drop bodies and keys when they follow one. Outermost, so that access,
    limits and routes see one path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(_ROUTES) and path.endswith("/") and not path.endswith("//"):
            raw: bytes = scope.get("raw_path") or path.encode()
            scope = {**scope, "path": path[:-1], "raw_path": raw.removesuffix(b"/")}
        await self._app(scope, receive, send)
