"""Connections that pack their commands in C: an append of a step has a thousand arguments.

The asynchronous connections of the client library pack in Python, also where its synchronous ones
use hiredis.
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
from redis.exceptions import DataError


class HiredisPacking:
    """Goes before a connection class."""

    def pack_command(self, *arguments: Any) -> list[bytes]:
        """One command, whose name may be of two words. Raises DataError for what is neither text,
        bytes nor a number."""
        name, *rest = arguments
        words = name.split() if isinstance(name, bytes) else str(name).encode().split()
        try:
            return [hiredis.pack_command((*words, *rest))]
        except TypeError as error:
            raise DataError(str(error)) from error


class PackingConnection(HiredisPacking, Connection):
    """TCP."""


class PackingSSLConnection(HiredisPacking, SSLConnection):
    """TLS."""


class PackingUnixConnection(HiredisPacking, UnixDomainSocketConnection):
    """A unix socket."""


PACKING: Mapping[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: PackingConnection,
    SSLConnection: PackingSSLConnection,
    UnixDomainSocketConnection: PackingUnixConnection,
}
