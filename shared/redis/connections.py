"""The connections of one process to its Redis server, by their use.

redis-py's defaults are wrong for a queue: they repeat a command after a lost reply, which is safe
only for idempotent transitions, and never notice a half-open subscriber.

commands   short time limits, a few quick retries: every script may be repeated
scripts    the same for scripts, which every request waits for: a separate, faster pool
accept     waits at the server until a write is on its disk or at its replicas; no retry
heartbeat  leases and nothing else, so that no amount of other commands delays a heartbeat; no
           retry: the next one is due before a repetition would help
blocking   waits at the server up to BLOCK_MS; no retry, the caller's loop handles errors
pubsub     no time limit on reads; the Subscriber has its own watchdog

With sentinels and in a cluster all of them lead to the primary (topology.py): one
server at a time, so pipelines, transactions and pools are the ordinary ones.
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
from shared.redis.redis_compat import CONNECTION_CLASSES, new_connection
from shared.redis.server_clock import ServerClock
from shared.redis.topology import (
    ClusterFinder,
    PrimaryConnection,
    PrimaryResolver,
    PrimaryTlsConnection,
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
HEARTBEAT_TIMEOUT_S = 2.0
PULL_TIMEOUT_S = BLOCK_MS / 1000 + 2.0
FIND_TIMEOUT_S = 1.0
MAX_COMMAND_CONNECTIONS = 64
MAX_HEARTBEAT_CONNECTIONS = 2  # the one in use, and its successor when it does not answer
MAX_ACCEPT_WAIT_S = 10.0
ACCEPT_TIMEOUT_S = MAX_ACCEPT_WAIT_S + 2.0
MAX_ACCEPT_CONNECTIONS = 256  # acceptances that wait for a disk or a replica at once
MAX_PULL_CONNECTIONS = 8  # one for each that pulls at once
COMMAND_RETRIES = 2


class Connections:
    """The clients of one process to one server. Nothing connects before the first command."""

    def __init__(self, url: str, slot_key: str = "") -> None:
        """`slot_key`: any key of the deployment; it determines the slot of a cluster.

        Raises UnsupportedUrl.
        """
        self.kind = kind_of(url)
        self.is_fake = self.kind is ServerKind.FAKE
        self._url = url
        self.primary = self._resolver_of(slot_key)
        self.clock = ServerClock()
        never = Retry(NoBackoff(), 0)
        often = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), COMMAND_RETRIES)
        self.commands = self._client(
            {"socket_timeout": COMMAND_TIMEOUT_S, "retry": often},
            BlockingConnectionPool,
            {"max_connections": MAX_COMMAND_CONNECTIONS, "timeout": COMMAND_TIMEOUT_S},
        )
        self.heartbeat = self._client(
            {"socket_timeout": HEARTBEAT_TIMEOUT_S, "retry": never},
            BlockingConnectionPool,
            {"max_connections": MAX_HEARTBEAT_CONNECTIONS, "timeout": HEARTBEAT_TIMEOUT_S},
        )
        # For pools that have their own time limit: connections without a limit on reads.
        self._pubsub = self._client({"socket_timeout": None, "retry": never}, ConnectionPool, {})
        self._quick = self._client({"socket_timeout": None, "retry": often}, ConnectionPool, {})
        self.scripts = CommandPool(
            partial(new_connection, self._quick),
            max_connections=MAX_COMMAND_CONNECTIONS,
            timeout_s=COMMAND_TIMEOUT_S,
            retry=often,
        )
        self.accept = CommandPool(
            partial(new_connection, self._quick),
            max_connections=MAX_ACCEPT_CONNECTIONS,
            timeout_s=ACCEPT_TIMEOUT_S,
            retry=never,
        )
        self.blocking = CommandPool(
            self.new_pubsub,
            max_connections=MAX_PULL_CONNECTIONS,
            timeout_s=PULL_TIMEOUT_S,
            retry=never,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether channels are sharded: published at one node, not broadcast to a whole cluster."""
        return self.kind is ServerKind.CLUSTER

    def new_pubsub(self) -> AbstractConnection:
        """Returns a new connection for pub/sub, not yet connected; the caller disconnects it."""
        return new_connection(self._pubsub)

    @asynccontextmanager
    async def reaching(self, key: str) -> AsyncIterator[Redis]:
        """Yields a client of the server that has `key`, also a key in another slot."""
        if self.kind is not ServerKind.CLUSTER:
            yield self.commands
            return
        client = self._client(
            {"socket_timeout": COMMAND_TIMEOUT_S, "retry": Retry(NoBackoff(), 0)},
            ConnectionPool,
            {},
            self._resolver_of(key),
        )
        try:
            yield client
        finally:
            await client.aclose(close_connection_pool=True)

    async def aclose(self) -> None:
        for pool in (self.scripts, self.accept, self.blocking):
            await pool.aclose()
        for client in (self.commands, self.heartbeat, self._pubsub, self._quick):
            await client.aclose(close_connection_pool=True)

    def _client(
        self,
        options: dict[str, Any],
        pool_class: type[ConnectionPool],
        pool_options: dict[str, Any],
        primary: PrimaryResolver | None = None,
    ) -> Redis:
        if self.is_fake:
            return fake_client(self._url)
        options |= {"protocol": 2, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        primary = primary or self.primary
        if primary is not None:
            server = _options_of(parse_deployment(self._url).server_url)
            is_tls = server["connection_class"] is SSLConnection
            server["connection_class"] = PrimaryTlsConnection if is_tls else PrimaryConnection
            return Redis.from_pool(
                pool_class(**server, **options, **pool_options, resolver=primary)
            )
        try:
            pool = pool_class.from_url(self._url, **options, **pool_options)
        except (ValueError, RedisError):  # its text repeats the URL
            raise _malformed() from None
        pool.connection_class = CONNECTION_CLASSES[pool.connection_class]
        return Redis.from_pool(pool)

    def _resolver_of(self, key: str) -> PrimaryResolver | None:
        if self.kind not in (ServerKind.SENTINEL, ServerKind.CLUSTER):
            return None
        deployment = parse_deployment(self._url)
        return PrimaryResolver(deployment.addresses, _finder_of(deployment, key))


def _finder_of(deployment: Deployment, key: str) -> SentinelFinder | ClusterFinder:
    new_server = partial(_plain_connection, _options_of(deployment.server_url))
    if deployment.kind is ServerKind.CLUSTER:
        return ClusterFinder(key, new_server)
    new_sentinel = partial(_plain_connection, _options_of(deployment.sentinel_url))
    return SentinelFinder(deployment.service, new_sentinel, new_server)


def _options_of(url: str) -> dict[str, Any]:
    """Returns the connection options in a server's URL, without its address."""
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


def _malformed() -> UnsupportedUrl:
    return UnsupportedUrl("PENSTOCK_REDIS_URL: the address or one of its options is malformed.")


# fake://<name>: an in-process server, for trying out and for tests of the transitions. It runs the
# same scripts; it keeps nothing, no other process can reach it, and its blocking reads are wrong.

_servers: dict[str, Any] = {}


def fake_client(url: str) -> Redis:
    """Returns a client of the process-wide fake server of that name; creates the server."""
    try:
        from fakeredis import FakeAsyncRedis, FakeServer
    except ImportError:
        raise UnsupportedUrl(
            "PENSTOCK_REDIS_URL: fake:// needs the package fakeredis[lua] (the extra "
            "penstock[server])."
        ) from None
    parts = urlsplit(url)
    name = parts.netloc + parts.path
    if name not in _servers:
        _servers[name] = FakeServer(version=(7,))
    client: Redis = FakeAsyncRedis(server=_servers[name], protocol=2)
    return client


def forget_fake_server(url: str) -> None:
    """Drops the fake server of that name with its data; a later client creates a new one."""
    parts = urlsplit(url)
    _servers.pop(parts.netloc + parts.path, None)
