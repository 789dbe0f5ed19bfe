"""BodyLimitMiddleware: no request body larger than the limit is read, let alone parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import CallerError


class BodyLimitMiddleware:
    """Pure ASGI. Raises CallerError (413) by the announced length, or while reading."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> CallerError:
        return CallerError(
            f"The request body is larger than {self._max_bytes} bytes.",
            status=413,
            code="request_too_large",
        )
