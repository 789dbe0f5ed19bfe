"""Ways to hold a connection: short commands, accepting, beats, waiting for work, listening.

The client library's defaults are wrong for a queue: they send a command again after a lost reply,
which is safe only for our idempotent transitions, and never notice a half-open subscriber.

cmd   short time limits, a few quick retries: every script may be repeated
calls the same for scripts, which every request waits for: a pool of their own that is quicker
accept waits at the server until a write is on its disk or at its replicas; no retry
beat  leases and nothing else, so that no amount of other commands makes a beat wait for a
      connection; no retry: a beat is out of date before it could be repeated, the next one is due
pull  waits at the server up to BLOCK_MS; no retry, its caller's loop handles errors
sub   no time limit on reads; the Subscriber brings its own watchdog

Behind sentinels and in a cluster the same four lead to the partition's home (home.py): one server
at a time, so pipelines, transactions and pools are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import RedisError

from shared.redis.pool import CommandPool
from shared.redis.server_clock import ServerClock
from shared.redis.server_connection import CONNECTION_CLASSES
from shared.redis.topology import (
    ClusterFinder,
    Home,
    HomedConnection,
    HomedSSLConnection,
    SentinelFinder,
)
from shared.redis.url import (
    Address,
    Deployment,
    ServerKind,
    UnsupportedUrl,
    kind_of,
    parse_deployment,
)

BLOCK_MS = 1000
CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 3.0
BEAT_TIMEOUT_S = 2.0
PULL_TIMEOUT_S = BLOCK_MS / 1000 + 2.0
FIND_TIMEOUT_S = 1.0
MAX_COMMAND_CONNECTIONS = 64
MAX_BEAT_CONNECTIONS = 2  # the one in use, and its successor when it does not answer
MAX_ACCEPT_WAIT_S = 10.0
ACCEPT_TIMEOUT_S = MAX_ACCEPT_WAIT_S + 2.0
MAX_ACCEPT_CONNECTIONS = 256  # acceptances that wait for a disk or a replica at once
MAX_PULL_CONNECTIONS = 8  # one for each that pulls at once
COMMAND_RETRIES = 2


class Connections:
    """The clients of one process to one server. Nothing connects before the first command."""

    def __init__(self, url: str, partition_key: str = "") -> None:
        """`partition_key`: any key of the partition; it says which slot of a cluster is meant.

        Raises UnsupportedUrl.
        """
        self.kind = kind_of(url)
        self.is_fake = self.kind is ServerKind.FAKE
        self._url = url
        self.home = self._home_of(partition_key)
        self.clock = ServerClock()
        never = Retry(NoBackoff(), 0)
        often = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), COMMAND_RETRIES)
        self.cmd = self._client(
            {"socket_timeout": COMMAND_TIMEOUT_S, "retry": often},
            BlockingConnectionPool,
            {"max_connections": MAX_COMMAND_CONNECTIONS, "timeout": COMMAND_TIMEOUT_S},
        )
        self.beat = self._client(
            {"socket_timeout": BEAT_TIMEOUT_S, "retry": never},
            BlockingConnectionPool,
            {"max_connections": MAX_BEAT_CONNECTIONS, "timeout": BEAT_TIMEOUT_S},
        )
        # These lend connections that limit no reads to whoever has a limit of its own.
        self._sub = self._client({"socket_timeout": None, "retry": never}, ConnectionPool, {})
        self._quick = self._client({"socket_timeout": None, "retry": often}, ConnectionPool, {})
        self.calls = CommandPool(
            partial(_new_connection, self._quick),
            max_connections=MAX_COMMAND_CONNECTIONS,
            timeout_s=COMMAND_TIMEOUT_S,
            retry=often,
        )
        self.accept = CommandPool(
            partial(_new_connection, self._quick),
            max_connections=MAX_ACCEPT_CONNECTIONS,
            timeout_s=ACCEPT_TIMEOUT_S,
            retry=never,
        )
        self.pull = CommandPool(
            self.new_sub,
            max_connections=MAX_PULL_CONNECTIONS,
            timeout_s=PULL_TIMEOUT_S,
            retry=never,
        )

    @property
    def is_sharded(self) -> bool:
        """Channels are sharded: heard at the home alone, not broadcast to a whole cluster."""
        return self.kind is ServerKind.CLUSTER

    def new_sub(self) -> AbstractConnection:
        """A connection of its own for pub/sub, not yet connected; the caller disconnects it."""
        return _new_connection(self._sub)

    @asynccontextmanager
    async def reaching(self, key: str) -> AsyncIterator[Redis]:
        """A client of whoever has `key`, which need not be in the partition."""
        if self.kind is not ServerKind.CLUSTER:
            yield self.cmd
            return
        client = self._client(
            {"socket_timeout": COMMAND_TIMEOUT_S, "retry": Retry(NoBackoff(), 0)},
            ConnectionPool,
            {},
            self._home_of(key),
        )
        try:
            yield client
        finally:
            await client.aclose(close_connection_pool=True)

    async def aclose(self) -> None:
        for pool in (self.calls, self.accept, self.pull):
            await pool.aclose()
        for client in (self.cmd, self.beat, self._sub, self._quick):
            await client.aclose(close_connection_pool=True)

    def _client(
        self,
        options: dict[str, Any],
        pool_class: type[ConnectionPool],
        pool_options: dict[str, Any],
        home: Home | None = None,
    ) -> Redis:
        if self.is_fake:
            return fake_client(self._url)
        options |= {"protocol": 2, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        home = home or self.home
        if home is not None:
            server = _options_of(parse_deployment(self._url).server_url)
            is_tls = server["connection_class"] is SSLConnection
            server["connection_class"] = HomedSSLConnection if is_tls else HomedConnection
            return Redis.from_pool(pool_class(**server, **options, **pool_options, home=home))
        try:
            pool = pool_class.from_url(self._url, **options, **pool_options)
        except (ValueError, RedisError):  # its text repeats the URL
            raise _malformed() from None
        pool.connection_class = CONNECTION_CLASSES[pool.connection_class]
        return Redis.from_pool(pool)

    def _home_of(self, key: str) -> Home | None:
        if self.kind not in (ServerKind.SENTINEL, ServerKind.CLUSTER):
            return None
        deployment = parse_deployment(self._url)
        return Home(deployment.addresses, _finder_of(deployment, key))


def _finder_of(deployment: Deployment, key: str) -> SentinelFinder | ClusterFinder:
    new_server = partial(_plain_connection, _options_of(deployment.server_url))
    if deployment.kind is ServerKind.CLUSTER:
        return ClusterFinder(key, new_server)
    new_sentinel = partial(_plain_connection, _options_of(deployment.sentinel_url))
    return SentinelFinder(deployment.service, new_sentinel, new_server)


def _options_of(url: str) -> dict[str, Any]:
    """What the URL of one server says of a connection, but for its address."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError:  # its text repeats the URL
        raise _malformed() from None
    del options["host"]
    options.setdefault("connection_class", Connection)
    return options


def _plain_connection(options: dict[str, Any], address: Address) -> AbstractConnection:
    options = dict(options)
    connection_class: Any = CONNECTION_CLASSES[options.pop("connection_class")]
    host, port = address
    connection: AbstractConnection = connection_class(
        host=host,
        port=port,
        protocol=2,
        socket_timeout=FIND_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
    return connection


def _new_connection(client: Redis) -> AbstractConnection:
    pool = client.connection_pool
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


def _malformed() -> UnsupportedUrl:
    return UnsupportedUrl("REDIS_URL: the address or one of its options is malformed.")


# fake://<name>: a stand-in inside this process, for trying out and for tests of the transitions.
#
# It runs the same scripts, but it keeps nothing, no other process can reach it, and its blocking
# reads are wrong: nobody may BLOCK on it. Not a server to serve from.

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
