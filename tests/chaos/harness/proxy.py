"""A proxy between a process and its Redis that can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

CHUNK = 65536

# Given a connection and what the server just said on it: is this reply to be lost?
Loses = Callable[["Connection", bytes], bool]


class Connection:
    """One client connection and its own one to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.is_listening = False  # has sent SUBSCRIBE
        self.is_blackholed = False  # from now on everything vanishes, in both directions
        self.num_replies = 0

    def cut(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """`async with Proxy(server_url, socket_path) as proxy:` then give processes `proxy.url`.

    Passes everything on, unless told otherwise: `delay_s` holds every reply back, `loses` chooses
    replies that are swallowed, after which the connection is cut, as when a reply is lost on the
    way. `refuses` turns new connections away.
    """

    def __init__(self, server_url: str, socket_path: Path) -> None:
        self.url = "unix://" + quote(str(socket_path))
        self.delay_s = 0.0
        self.loses: Loses | None = None
        self.refuses = False
        self.num_lost = 0
        self.connections: list[Connection] = []
        self._target = unquote(server_url.removeprefix("unix://"))
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket_path))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Ends all connections that there are now."""
        for connection in list(self.connections):
            connection.cut()

    def blackhole(self, which: Callable[[Connection], bool]) -> int:
        """Both sides of these connections hear nothing any more, not even an end."""
        chosen = [connection for connection in self.connections if which(connection)]
        for connection in chosen:
            connection.is_blackholed = True
        return len(chosen)

    def lose_some(self, rng: random.Random, share: float) -> None:
        """Loses this share of the replies on connections that do not listen."""
        self.loses = lambda connection, reply: (
            not connection.is_listening and connection.num_replies > 3 and rng.random() < share
        )

    def lose_next(self, marker: bytes) -> None:
        """Loses the next reply that contains these bytes, and no other."""

        def has_it(connection: Connection, reply: bytes) -> bool:
            if marker not in reply:
                return False
            self.loses = None
            return True

        self.loses = has_it

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.refuses:
            client.transport.abort()
            return
        try:
            from_server, server = await asyncio.open_unix_connection(self._target)
        except OSError:
            client.transport.abort()
            return
        connection = Connection(client, server)
        self.connections.append(connection)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._pass_both_ways(connection, reader, from_server)
        finally:
            self._tasks.discard(task)
            self.connections.remove(connection)
            connection.cut()

    async def _pass_both_ways(
        self,
        connection: Connection,
        from_client: asyncio.StreamReader,
        from_server: asyncio.StreamReader,
    ) -> None:
        async def up() -> None:
            while data := await from_client.read(CHUNK):
                connection.is_listening |= b"SUBSCRIBE" in data
                if not connection.is_blackholed:
                    connection.server.write(data)
                    await connection.server.drain()

        async def down() -> None:
            while data := await from_server.read(CHUNK):
                if connection.is_blackholed:
                    continue
                connection.num_replies += 1
                if self.loses is not None and self.loses(connection, data):
                    self.num_lost += 1
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                connection.client.write(data)
                await connection.client.drain()

        ways = [asyncio.create_task(up()), asyncio.create_task(down())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for way in ways:
                if not way.cancelled():
                    way.exception()  # a connection that ended: seen
