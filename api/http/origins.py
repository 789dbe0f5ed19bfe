"""Origins: which sites' pages may call this server from a browser, and read its answers.

CorsMiddleware adds the headers with which a browser lets a page read. OriginMiddleware refuses the
other pages' requests: those that need no preflight arrive whether or not the answer can be read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import MAX_ECHO_CHARS, CallerError
from api.http.response_headers import RATE_LIMIT_HEADERS

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


# Authority: the `host[:port]` of a Host header or of an origin, taken apart.

MAX_AUTHORITY_CHARS = 300  # a DNS name has up to 253

_AUTHORITY = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+))"
    r"(?::(?P<port>[0-9]{0,5}))?",
    re.ASCII,
)


def host_of(authority: str) -> str | None:
    """Returns the host in lower case, without port, brackets and closing dot.

    None for what RFC 3986 does not allow, for an empty host and for a port above 65535.
    """
    return None if len(authority) > MAX_AUTHORITY_CHARS else _host_of(authority)


@lru_cache(1024)
def _host_of(authority: str) -> str | None:
    found = _AUTHORITY.fullmatch(authority)
    if found is None or int(found["port"] or 0) > 65535:
        return None
    if found["ipv6"] is None:
        return found["name"].lower().removesuffix(".") or None
    return found["ipv6"].lower() if is_address(found["ipv6"]) else None


@lru_cache(1024)
def is_address(host: str) -> bool:
    """Whether the host is an IP address as browsers write it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether the host means this machine: a loopback address, localhost or a name below it."""
    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


# AllowedHostsMiddleware: the names under which a request may reach the server.

ANY = "*"


class AllowedHosts:
    """A list of names. `*.example.com` stands for all names below example.com, `*` for any.

    Loopback names and IP addresses are always allowed. DNS rebinding makes a name of a foreign
    site resolve to this server, so that its pages count as the server's own: it needs a name.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._any = ANY in names
        self._names = frozenset(names)
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def allows(self, host: str) -> bool:
        """Whether a host of `host_of` is on the list."""
        return (
            self._any
            or host in self._names
            or host.endswith(self._suffixes)
            or is_loopback(host)
            or is_address(host)
        )


class AllowedHostsMiddleware:
    """Pure ASGI. Raises CallerError: 400 without exactly one well-formed Host, as RFC 9112
    requires (HTTP/1.0 may have none), and 421 for a host that is not allowed."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        values = [value for name, value in scope["headers"] if name == b"host"]
        if not values and scope["http_version"] == "1.0":
            return  # no browser speaks it
        if len(values) != 1:
            raise _invalid(f"A request has one Host header, this one has {len(values)}.")
        host = host_of(values[0].decode("latin-1"))
        if host is None:
            raise _invalid("The Host header is not a host name with an optional port.")
        if not self._allowed.allows(host):
            raise CallerError(
                f"This server does not answer for the host '{host[:MAX_ECHO_CHARS]}'. Its "
                "operator can add the name to ALLOWED_HOSTS.",
                status=421,
                code="host_not_allowed",
                param="Host",
                should_retry=False,
            )


def _invalid(message: str) -> CallerError:
    return CallerError(message, code="invalid_host", param="Host", should_retry=False)
