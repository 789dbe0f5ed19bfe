"""Origins and hosts: which sites' pages may call this server, and under which names.

Starlette's CORSMiddleware adds the headers with which a browser lets a page read a response. It
does not refuse the requests of other pages, which arrive even if a page cannot read the response.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import MAX_ECHO_CHARS
from api.http.json_response import error_response
from api.http.response_headers import RATE_LIMIT_HEADERS
from api.request_errors import ClientError

EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-should-retry",
    "x-penstock-durability",
    "x-penstock-ignored",
    "etag",
    "stream-next-offset",
    "stream-up-to-date",
    "stream-closed",
    "stream-cursor",
    "penstock-job-status",
    *RATE_LIMIT_HEADERS,
)
_WEB = ("http", "https")
# Schemes that a page from the web can have. All others are those of installed programs: app://,
# tauri://, vscode-webview://, capacitor://.
_PAGE_SCHEMES = (
    *(*_WEB, "ws", "wss", "ftp", "file", "content", "data", "blob", "filesystem", "about"),
    *("javascript", "view-source"),
)
_PROGRAM_ORIGIN = rf"(?i:(?!({'|'.join(_PAGE_SCHEMES)}):)[a-z][a-z0-9+.-]*://[^\s,]*)"
ANY_OF_SCHEME = "://*"  # at the end of an origin: every one of the scheme
_LOOPBACK_ORIGIN = (
    r"(?i:https?://(([a-z0-9_-]+\.)*localhost\.?|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?)"
)


class AllowedOrigins:
    """Origins as browsers send them, `*` for any, `scheme://*` for any of a scheme.

    `local` adds the origins of this machine: http and https of loopback names on every port, and
    those of programs, whose schemes no page from the web has.
    """

    def __init__(self, origins: Collection[str], *, local: bool = False) -> None:
        self.any = "*" in origins
        self.origins = frozenset(origins)
        schemes = [name[:-1] for name in origins if name.endswith(ANY_OF_SCHEME)]
        patterns = [rf"(?i:{re.escape(scheme)})[^\s,]*" for scheme in schemes]
        if local:
            patterns += [_LOOPBACK_ORIGIN, _PROGRAM_ORIGIN]
        self.regex = "|".join(patterns) or None

    def allows(self, origin: str) -> bool:
        """Returns whether pages of the origin may call this server."""
        is_matched = self.regex is not None and re.fullmatch(self.regex, origin) is not None
        return self.any or origin in self.origins or is_matched


class OriginMiddleware:
    """Pure ASGI. CORS for the pages of allowed origins; a 403 for other pages, preflights included.

    The server's own pages are always allowed: a browser calls them same-origin, or their origin is
    the request's host. A request without an origin comes from no page, or can change nothing; it
    does not pass CORSMiddleware, which costs a part of a microsecond per event of a stream.
    """

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins.origins,
            allow_origin_regex=origins.regex,
            allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),  # SDKs send many of their own; no header is a credential here
            expose_headers=EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif self._origins.allows(origin) or _is_own(headers):
            await self._cors(scope, receive, send)
        else:
            response = error_response(_not_allowed(origin), scope)
            response.headers.add_vary_header("Origin")
            await response(scope, receive, send)


def _is_own(headers: Headers) -> bool:
    # Behind a proxy the host may differ from the browser's. So its Sec-Fetch-Site counts, too: no
    # page can set this header.
    if headers.get("sec-fetch-site") == "same-origin":
        return True
    scheme, _, authority = headers["origin"].lower().partition("://")
    return scheme in _WEB and authority == headers.get("host", "").lower()


def _not_allowed(origin: str) -> ClientError:
    return ClientError(
        f"Pages of the origin '{origin[:MAX_ECHO_CHARS]}' may not call this server. Its operator "
        "can add the origin to PENSTOCK_CORS_ORIGINS.",
        status=403,
        code="origin_not_allowed",
        param="Origin",
        should_retry=False,
    )


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
    """Returns whether the host is an IP address as browsers write it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Returns whether the host is this machine: a loopback address, localhost or a name below."""
    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


ANY = "*"


class AllowedHosts:
    """Host names. `*.example.com` stands for all names below example.com, `*` for any.

    Loopback names and IP addresses are always allowed. DNS rebinding makes a name of a foreign site
    resolve to this server, so that its pages count as the server's own: it needs a name.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._any = ANY in names
        self._names = frozenset(names)
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def allows(self, host: str) -> bool:
        """Returns whether requests for a host (of `host_of`) are accepted."""
        return (
            self._any
            or host in self._names
            or host.endswith(self._suffixes)
            or is_loopback(host)
            or is_address(host)
        )


class AllowedHostsMiddleware:
    """Pure ASGI. Raises ClientError: 400 without exactly one well-formed Host, as RFC 9112
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
            raise ClientError(
                f"This server does not serve the host '{host[:MAX_ECHO_CHARS]}'. Its "
                "operator can add the name to PENSTOCK_ALLOWED_HOSTS.",
                status=421,
                code="host_not_allowed",
                param="Host",
                should_retry=False,
            )


def _invalid(message: str) -> ClientError:
    return ClientError(message, code="invalid_host", param="Host", should_retry=False)
