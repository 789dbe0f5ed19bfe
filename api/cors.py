"""CorsMiddleware: browsers of allowed origins may call, and may read the errors too."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import CallerError

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = (
    "accept",
    "authorization",
    "content-type",
    "idempotency-key",
    "last-event-id",
    "user-agent",  # OpenAI's SDK sets it; some browsers then ask for it
    "x-api-key",
    "x-client-request-id",
    "x-request-id",
)
ALLOWED_PREFIXES = ("x-stainless-", "openai-", "anthropic-")  # what the SDKs say of themselves
EXPOSED_HEADERS = "x-request-id, request-id, retry-after, x-should-retry"
MAX_AGE_S = 600
MAX_ASKED_HEADERS = 64


class CorsMiddleware:
    """Pure ASGI. Stands outside of the error answers, so that those carry its headers as well."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(headers, allowed)(scope, receive, send)
            return

        async def open_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._open(MutableHeaders(scope=message), allowed)
            await send(message)

        await self._app(scope, receive, open_send)

    def _allowed(self, origin: str) -> str | None:
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None

    def _open(self, headers: MutableHeaders, allowed: str | None) -> None:
        if "*" not in self._origins:
            headers.add_vary_header("Origin")
        if allowed is not None:
            headers["access-control-allow-origin"] = allowed
            headers["access-control-expose-headers"] = EXPOSED_HEADERS

    def _preflight(self, headers: Headers, allowed: str | None) -> Response:
        if allowed is None:
            error = CallerError(
                "This origin may not call from a browser.", status=403, code="origin_not_allowed"
            )
            return error.response()
        asked = headers.get("access-control-request-headers", "").lower().split(",")
        names = [name.strip() for name in asked[:MAX_ASKED_HEADERS]]
        ours = [name for name in names if name.startswith(ALLOWED_PREFIXES) and _is_token(name)]
        response = Response(status_code=204)
        self._open(response.headers, allowed)
        response.headers["access-control-allow-methods"] = METHODS
        response.headers["access-control-allow-headers"] = ", ".join((*ALLOWED_HEADERS, *ours))
        response.headers["access-control-max-age"] = str(MAX_AGE_S)
        return response


def _is_token(name: str) -> bool:
    return len(name) <= 64 and name.replace("-", "").isalnum() and name.isascii()
