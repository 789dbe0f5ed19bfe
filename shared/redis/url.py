"""Redis URLs: the supported kinds, their parts, and how to print one without its password."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

SENTINEL_PORT = 26379
CLUSTER_PORT = 6379
MAX_ADDRESSES = 32

_SECRET_OPTIONS = frozenset({"password", "ssl_password", "sentinel_password"})
_OPTIONS = frozenset({"db", "username", "password"})
_TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_exclude_verify_flags",
        "ssl_include_verify_flags",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_HIDDEN = "***"
# What a sentinel accepts as a primary's name.
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@\s]+)(?::(\d{1,5}))?")

Address = tuple[str, int]


class ServerKind(StrEnum):
    """SINGLE: one server. SENTINEL: the primary that sentinels name. CLUSTER: the slot's node."""

    FAKE = "fake"
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


SCHEMES = {
    "redis": ServerKind.SINGLE,
    "rediss": ServerKind.SINGLE,
    "unix": ServerKind.SINGLE,
    "fake": ServerKind.FAKE,
    "redis+sentinel": ServerKind.SENTINEL,
    "rediss+sentinel": ServerKind.SENTINEL,
    "redis+cluster": ServerKind.CLUSTER,
    "rediss+cluster": ServerKind.CLUSTER,
}


class UnsupportedUrl(ValueError):
    """A URL of no supported server. The sentence never holds a password."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The parts of a sentinel or cluster URL."""

    kind: ServerKind
    addresses: tuple[Address, ...]  # of sentinels, or of the first nodes to ask
    service: str  # the sentinels' name of the primary; '' for a cluster
    server_url: str  # credentials, TLS, database and options of each server; a placeholder address
    sentinel_url: str  # the same for a sentinel; '' for a cluster


def scheme_of(url: str) -> str:
    """Returns the URL's scheme. Raises UnsupportedUrl with a sentence."""
    scheme, colon, _ = url.partition("://")
    scheme = scheme.lower()
    if not colon or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise UnsupportedUrl(
            "PENSTOCK_REDIS_URL must begin with redis://, rediss://, unix:// or fake://, "
            "for example redis://localhost:6379/0."
        )
    if scheme not in SCHEMES:
        raise UnsupportedUrl(
            f"PENSTOCK_REDIS_URL: {scheme}:// is not a supported scheme; use redis://, rediss://, "
            "unix://, redis+sentinel://, redis+cluster:// (or either with rediss) or fake://."
        )
    if SCHEMES[scheme] in (ServerKind.SENTINEL, ServerKind.CLUSTER):
        parse_deployment(url)
        return scheme
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: the address is malformed.") from None
    if scheme == "unix" and not parts.path:
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: unix:// needs the path of a socket.")
    _check_options(parts.query, _OPTIONS | (_TLS_OPTIONS if scheme == "rediss" else frozenset()))
    return scheme


def kind_of(url: str) -> ServerKind:
    """Returns the kind of server. Raises UnsupportedUrl."""
    return SCHEMES[scheme_of(url)]


def parse_deployment(url: str) -> Deployment:
    """Returns the parts of a redis+sentinel:// or redis+cluster:// URL (or with rediss).

    Raises UnsupportedUrl with a sentence.
    """
    scheme, _, rest = url.partition("://")
    kind = SCHEMES[scheme.lower()]
    # By hand: the standard library knows no list of hosts.
    rest, _, query = rest.partition("?")
    if "#" in rest + query:
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: the address is malformed.")
    authority, _, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    if "@" in path + query:
        raise UnsupportedUrl(
            "PENSTOCK_REDIS_URL: in a password, '/' is written as %2F, '?' as %3F and '@' as %40."
        )
    is_sentinel = kind is ServerKind.SENTINEL
    addresses = _addresses(hosts, SENTINEL_PORT if is_sentinel else CLUSTER_PORT)
    service, database = _sentinel_path(path) if is_sentinel else _cluster_path(path)
    plain = scheme.lower().partition("+")[0]
    allowed = _OPTIONS - {"db"}  # it is in the path
    allowed |= _SENTINEL_OPTIONS if is_sentinel else frozenset()
    allowed |= _TLS_OPTIONS if plain == "rediss" else frozenset()
    _check_options(query, allowed)
    options = parse_qsl(query, keep_blank_values=True)
    server = [(name, value) for name, value in options if name not in _SENTINEL_OPTIONS]
    # A sentinel has its own users, or none; the servers' password is not sent to it.
    sentinel = [
        (name.removeprefix("sentinel_"), value)
        for name, value in options
        if name in _SENTINEL_OPTIONS or name.startswith("ssl_")
    ]
    server_url = f"{plain}://{credentials}{at}server/{database}?{urlencode(server)}"
    try:
        urlsplit(server_url)
    except ValueError:
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: the address is malformed.") from None
    sentinel_url = f"{plain}://sentinel/0?{urlencode(sentinel)}" if is_sentinel else ""
    return Deployment(kind, addresses, service, server_url, sentinel_url)


def socket_path(url: str) -> str:
    """Returns the path of a unix:// URL."""
    return unquote(urlsplit(url).path)


def redacted(url: str) -> str:
    """Returns the URL for logs, user name and password hidden, also of a malformed one."""
    head, found, rest = url.partition("://")
    if not found:
        return _HIDDEN
    # By hand: newer releases of the standard library refuse a list of hosts with an IPv6 address.
    before_query, _, query = rest.partition("#")[0].partition("?")
    authority, slash, path = before_query.partition("/")
    if "@" in rest[len(authority) :]:
        # A password with an unescaped '/', '?' or '#': the parts cannot be distinguished.
        return f"{head}://{_HIDDEN}@{rest.rpartition('@')[2]}"
    host = authority.rpartition("@")[2]
    shown = f"{_HIDDEN}@{host}" if "@" in authority else host
    options = [
        (name, _HIDDEN if name.lower() in _SECRET_OPTIONS else value)
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    shown_query = "?" + urlencode(options, safe="*/") if options else ""
    return f"{head}://{shown}{slash}{path}{shown_query}"


def _check_options(query: str, allowed: frozenset[str]) -> None:
    for name, _ in parse_qsl(query, keep_blank_values=True):
        # Time limits, pools and protocol belong to the connection profiles.
        if name not in allowed:
            raise UnsupportedUrl(f"PENSTOCK_REDIS_URL: the option {name[:40]!r} is not supported.")


def _addresses(hosts: str, default_port: int) -> tuple[Address, ...]:
    addresses = []
    for part in hosts.split(","):
        match = _ADDRESS.fullmatch(part)
        port = int(match[2] or default_port) if match else 0
        if not match or not 1 <= port <= 65535:
            raise UnsupportedUrl(
                "PENSTOCK_REDIS_URL: the addresses are malformed; write host:port,host:port."
            )
        addresses.append((unquote(match[1].strip("[]")), port))
    if len(addresses) > MAX_ADDRESSES:
        raise UnsupportedUrl(f"PENSTOCK_REDIS_URL: more than {MAX_ADDRESSES} addresses.")
    return tuple(dict.fromkeys(addresses))


def _sentinel_path(path: str) -> tuple[str, str]:
    service, _, database = path.partition("/")
    service = unquote(service)
    if not _SERVICE.fullmatch(service):
        raise UnsupportedUrl(
            "PENSTOCK_REDIS_URL: redis+sentinel:// needs the sentinels' name of the primary: "
            "redis+sentinel://host:26379,host:26379/mymaster/0."
        )
    if not re.fullmatch(r"\d{0,5}", database):
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: the database is a number, as in /mymaster/0.")
    return service, database or "0"


def _cluster_path(path: str) -> tuple[str, str]:
    if path not in ("", "0"):
        raise UnsupportedUrl("PENSTOCK_REDIS_URL: a cluster has only database 0; omit the path.")
    return "", "0"
