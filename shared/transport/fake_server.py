"""fake://<name>: a stand-in inside this process, for trying out and for tests of the transitions.

It runs the same scripts, but it keeps nothing, no other process can reach it, and its blocking
reads are wrong: nobody may BLOCK on it. Not a server to serve from.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis

from shared.transport.server_url import UnsupportedUrl

_servers: dict[str, Any] = {}


def fake_client(url: str) -> Redis:
    """A client of the process-wide stand-in of that name, which begins with its first client."""
    try:
        from fakeredis import FakeAsyncRedis, FakeServer
    except ImportError:
        raise UnsupportedUrl(
            "REDIS_URL: fake:// needs the package fakeredis[lua] (the extra penstock[server])."
        ) from None
    parts = urlsplit(url)
    name = parts.netloc + parts.path
    if name not in _servers:
        _servers[name] = FakeServer(version=(7,))
    client: Redis = FakeAsyncRedis(server=_servers[name], protocol=2)
    return client


def forget_fake_server(url: str) -> None:
    """Drops the stand-in of that name with all it holds; later clients begin a new one."""
    parts = urlsplit(url)
    _servers.pop(parts.netloc + parts.path, None)
