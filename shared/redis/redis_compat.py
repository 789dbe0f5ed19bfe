"""redis-py's connections as Penstock changes them, and what it uses of them.

Only this module overrides and uses interfaces of redis-py that are not public; USES names them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.compat import check_library

TRIED = "redis>=8.0,<9"
USES: dict[type, tuple[str, ...]] = {
    ConnectionPool: ("make_connection", "connection_class"),
    AbstractConnection: (
        *("pack_command", "pack_commands", "send_packed_command", "read_response", "can_read"),
        *("connect", "connect_check_health", "check_health", "disconnect", "is_connected"),
        *("_connect", "_writer", "socket_timeout"),
    ),
}


def check_redis() -> None:
    """Raises IncompatibleLibrary if the installed redis-py lacks an interface used here."""
    check_library(TRIED, USES)


def new_connection(client: Redis) -> AbstractConnection:
    """Returns a connection like a client's, not connected and in no pool."""
    pool = client.connection_pool
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


async def is_stale(connection: AbstractConnection) -> bool:
    """Returns whether the server has closed the connection, or sent something unrequested."""
    try:
        return bool(await connection.can_read())
    except (OSError, RedisConnectionError):
        return True


# How uvloop's RuntimeError for a transport that has ended closes. Others ("Event loop is closed",
# "no running event loop") are programming errors and are raised unchanged.
_UVLOOP_CLOSED = "the handler is closed"


class ServerConnection(AbstractConnection):
    """Mixin, the first base of a connection class: changes redis-py's connections in three points.

    They pack commands in C: an append of a step has a thousand arguments, and redis-py's
    asynchronous connections pack in Python. A write to a connection that was just reset raises
    ConnectionError, as every other loss does: uvloop raises RuntimeError there, which redis-py
    passes on, and which would never be retried. A cancel during a write ends the task: redis-py
    bounds writes by `asyncio.wait_for`, which up to Python 3.11 loses a cancel that arrives when
    the write has just finished.
    """

    async def locate(self) -> None:
        """Sets the address before each connect, where it changes."""

    async def _connect(self) -> None:
        await self.locate()
        await super()._connect()  # type: ignore[safe-super, no-untyped-call]

    def pack_command(self, *arguments: Any) -> list[bytes]:
        """Returns one packed command, whose name may have two parts. Raises DataError for an
        argument that is neither text, bytes nor a number."""
        name, *rest = arguments
        words = name.split() if isinstance(name, bytes) else str(name).encode().split()
        try:
            return [hiredis.pack_command((*words, *rest))]
        except TypeError as error:
            raise DataError(str(error)) from error

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Writes the packed command. Raises RedisError for every kind of lost connection."""
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        writer = self._writer
        assert writer is not None
        try:
            async with asyncio.timeout(self.socket_timeout):
                writer.writelines([command] if isinstance(command, bytes) else command)
                await writer.drain()
        except BaseException as error:
            # Part of the command may have been written.
            await self.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError("the write did not end in time") from error
            is_closed = isinstance(error, RuntimeError) and str(error).endswith(_UVLOOP_CLOSED)
            if is_closed or isinstance(error, OSError):
                raise RedisConnectionError(f"the connection was lost ({error})") from error
            raise


class TcpConnection(ServerConnection, Connection):
    """TCP."""


class TlsConnection(ServerConnection, SSLConnection):
    """TLS."""


class UnixConnection(ServerConnection, UnixDomainSocketConnection):
    """A unix socket."""


CONNECTION_CLASSES: Mapping[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: TcpConnection,
    SSLConnection: TlsConnection,
    UnixDomainSocketConnection: UnixConnection,
}
