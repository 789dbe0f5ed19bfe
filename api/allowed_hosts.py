"""AllowedHostsMiddleware: the names under which a request may reach the server."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from api.authority import host_of, is_address, is_loopback
from api.errors import MAX_ECHO_CHARS, CallerError

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
