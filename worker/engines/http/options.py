"""The settings of PENSTOCK_ENGINE=http, as far as they need no network."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_UPSTREAMS = 64
MAX_WEIGHT = 100

_ENTRY = re.compile(r"(?P<url>\S+)(?:\s+weight=(?P<weight>\d+))?")


class UpstreamAddress(NamedTuple):
    """The base URL of a server, without a slash at the end, and its share of the requests."""

    url: str
    weight: int = 1


def parse_upstreams(text: str) -> tuple[UpstreamAddress, ...]:
    """Returns the servers of PENSTOCK_UPSTREAM_URLS: `http://a:8000 weight=2, http://b:8000`.

    Empty text has none. Raises ValueError with the requirement that it misses.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if len(entries) > MAX_UPSTREAMS:
        raise ValueError(f"has {len(entries)} URLs; at most {MAX_UPSTREAMS} are allowed")
    addresses = tuple(map(_address, entries))
    if len({address.url for address in addresses}) < len(addresses):
        raise ValueError("has a URL twice; write weight=2 after it instead")
    return addresses


def _address(entry: str) -> UpstreamAddress:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} must be a URL, or a URL and weight=N")
    weight = int(match["weight"] or 1)
    if not 1 <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight in {entry!r} must be between 1 and {MAX_WEIGHT}")
    parts = urlsplit(match["url"])
    if parts.username or parts.password:
        raise ValueError("a URL must not contain a key; PENSTOCK_UPSTREAM_KEY_FILE names its file")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{match['url']!r} must begin with http:// or https:// and name a host")
    if parts.query or parts.fragment:
        raise ValueError(f"{match['url']!r} must not have a query or a fragment")
    return UpstreamAddress(match["url"].rstrip("/").removesuffix("/v1"), weight)
