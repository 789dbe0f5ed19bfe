"""redis-py's connections, changed in two points.

They pack commands in C: an append of a step has a thousand arguments, and redis-py's asynchronous
connections pack in Python, also where its synchronous ones use hiredis.

A write to a connection that was just reset raises ConnectionError, as every other loss does. uvloop
raises RuntimeError there, which redis-py passes on: it would never be retried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hiredis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError

# How uvloop's RuntimeError for a transport that has ended closes. Others ("Event loop is closed",
# "no running event loop") are programming errors and are raised unchanged.
_UVLOOP_CLOSED = "the handler is closed"


class ServerConnection(AbstractConnection):
    """A mixin: the base of a connection class that comes before the library's class."""

    def pack_command(self, *arguments: Any) -> list[bytes]:
        """Returns one packed command, whose name may have two words. Raises DataError for an
        argument that is neither text, bytes nor a number."""
        name, *rest = arguments
        words = name.split() if isinstance(name, bytes) else str(name).encode().split()
        try:
            return [hiredis.pack_command((*words, *rest))]
        except TypeError as error:
            raise DataError(str(error)) from error

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Writes the packed command. Raises RedisError for every kind of lost connection."""
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:  # the library has closed the connection
            if not str(error).endswith(_UVLOOP_CLOSED):
                raise
            raise RedisConnectionError("the connection was lost before the write") from error


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
