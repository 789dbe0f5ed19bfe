"""Authority: the `host[:port]` of a Host header or of an origin, taken apart."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

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
