"""Origins: which sites' pages may call this server from a browser, and read its answers.

CorsMiddleware adds the headers with which a browser lets a page read. OriginMiddleware refuses the
other pages' requests: those that need no preflight arrive whether or not the answer can be read.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.authority import host_of, is_loopback
from api.errors import MAX_ECHO_CHARS, CallerError
from api.rate_limit_headers import RATE_LIMIT_HEADERS

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
EXPOSED_HEADERS = ", ".join(
    (
        "x-request-id",
        "request-id",
        "retry-after",
        "x-should-retry",
        "x-penstock-durability",
        "x-penstock-ignored",
        *RATE_LIMIT_HEADERS,
    )
)
MAX_AGE_S = 600
MAX_ASKED_HEADERS = 64
_WEB = ("http", "https")


class AllowedOrigins:
    """A list of origins as browsers send them, `*` for any; `loopback` adds those of this machine:
    http and https, on every port."""

    def __init__(self, origins: Collection[str], *, loopback: bool = False) -> None:
        self.any = "*" in origins
        self._origins = frozenset(origins)
        self._loopback = loopback

    def allows(self, origin: str) -> bool:
        return self.any or origin in self._origins or (self._loopback and _is_loopback(origin))


class CorsMiddleware:
    """Pure ASGI. Stands outside of the error answers, so that those carry its headers as well."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
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
        if self._origins.any:
            return "*"
        return origin if self._origins.allows(origin) else None

    def _open(self, headers: MutableHeaders, allowed: str | None) -> None:
        if not self._origins.any:
            headers.add_vary_header("Origin")
        if allowed is not None:
            headers["access-control-allow-origin"] = allowed
            headers["access-control-expose-headers"] = EXPOSED_HEADERS

    def _preflight(self, headers: Headers, allowed: str | None) -> Response:
        if allowed is None:
            return _not_allowed(headers["origin"]).response()
        asked = headers.get("access-control-request-headers", "").lower().split(",")
        names = [name.strip() for name in asked[:MAX_ASKED_HEADERS]]
        ours = [name for name in names if name.startswith(ALLOWED_PREFIXES) and _is_token(name)]
        response = Response(status_code=204)
        self._open(response.headers, allowed)
        response.headers["access-control-allow-methods"] = METHODS
        response.headers["access-control-allow-headers"] = ", ".join((*ALLOWED_HEADERS, *ours))
        response.headers["access-control-max-age"] = str(MAX_AGE_S)
        return response


class OriginMiddleware:
    """Pure ASGI. Raises CallerError (403) for a request of a page whose origin is not allowed.

    The server's own pages are always allowed: a browser calls them same-origin, or their origin is
    the request's host. A request without an origin comes from no page, or can change nothing.
    """

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._origins.any:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._origins.allows(origin) and not _is_own(headers):
                raise _not_allowed(origin)
        await self._app(scope, receive, send)


def _is_own(headers: Headers) -> bool:
    # Behind a proxy the host may be another one than the browser's, so the browser's word counts
    # too; no page can write this header.
    if headers.get("sec-fetch-site") == "same-origin":
        return True
    scheme, _, authority = headers["origin"].lower().partition("://")
    return scheme in _WEB and authority == headers.get("host", "").lower()


def _is_loopback(origin: str) -> bool:
    scheme, _, authority = origin.partition("://")
    host = host_of(authority)
    return scheme in _WEB and host is not None and is_loopback(host)


def _not_allowed(origin: str) -> CallerError:
    return CallerError(
        f"Pages of the origin '{origin[:MAX_ECHO_CHARS]}' may not call this server. Its operator "
        "can add the origin to CORS_ORIGINS.",
        status=403,
        code="origin_not_allowed",
        param="Origin",
        should_retry=False,
    )


def _is_token(name: str) -> bool:
    return len(name) <= 64 and name.replace("-", "").isalnum() and name.isascii()
