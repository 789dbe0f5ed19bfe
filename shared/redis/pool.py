"""CommandPool: gives a connection for one exchange at little cost.

redis-py's own way (its pool, its time limit on each write, its metrics) takes three times the
processor time of the exchange itself, and every step of a request waits for an exchange
(docs/adr/0035).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.redis_compat import is_stale

Word = str | bytes | int
Command = Sequence[Word]


class Commands(Protocol):
    """Sends commands: a CommandPool, or redis-py's client."""

    async def execute_command(self, *words: Any) -> Any:
        """Returns the reply, with byte strings as sent. Raises RedisError."""
        ...


class CommandPool:
    """At most `max_connections` exchanges at once; more wait, as long as one may take."""

    def __init__(
        self,
        new_connection: Callable[[], AbstractConnection],
        *,
        max_connections: int,
        timeout_s: float,
        retry: Retry,
    ) -> None:
        """`new_connection` returns one that is not connected and limits no reads. `timeout_s`
        bounds an exchange, twice as much connecting, which may have to look the primary up first.
        `retry` applies to lost connections."""
        self._new_connection = new_connection
        self._timeout_s = timeout_s
        self._retry = retry
        self._places = asyncio.Semaphore(max_connections)
        self._free: list[AbstractConnection] = []
        self._all: list[AbstractConnection] = []

    async def execute_command(self, *words: Word) -> Any:
        """Returns the reply to one command. Raises RedisError, also for an error reply."""
        (reply,) = await self.exchange(words)
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def exchange(self, *commands: Command) -> list[Any]:
        """Sends the commands in one write; returns a reply to each, which may be a ResponseError.

        If the connection is lost, all of them are sent again, as `retry` allows. Raises
        RedisError.
        """
        return await self._retry.call_with_retry(lambda: self._exchange(commands), _lost)

    async def aclose(self) -> None:
        for connection in self._all:
            await connection.disconnect(nowait=True)

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        await self._take_place()
        connection = self._free.pop() if self._free else self._new()
        try:
            if not connection.is_connected or await is_stale(connection):
                await self._connect(connection)
            async with asyncio.timeout(self._timeout_s):
                words = connection.pack_commands(commands)
                await connection.send_packed_command(words, check_health=False)
                return [await _reply(connection) for _ in commands]
        except BaseException as error:
            # A late reply would be taken for the next command's.
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError("Redis did not answer in time") from error
            raise
        finally:
            self._free.append(connection)
            self._places.release()

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise RedisConnectionError("No connection available.") from None

    def _new(self) -> AbstractConnection:
        connection = self._new_connection()
        self._all.append(connection)
        return connection

    async def _connect(self, connection: AbstractConnection) -> None:
        async with asyncio.timeout(2 * self._timeout_s):
            await connection.disconnect(nowait=True)
            await connection.connect()  # type: ignore[no-untyped-call]


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def _lost(error: Exception) -> None:
    """Does nothing: the connection has been dropped already."""
