"""A proxy between a process and its Redis that misbehaves on request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

from tests.support.launched import free_port

CHUNK = 65536
NO_LINGER = struct.pack("ii", 1, 0)  # closing sends RST at once

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

    def reset(self) -> None:
        """Ends it towards the client by a TCP reset, as a load balancer without a backend does."""
        _reset(self.client)
        self.server.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()


class Proxy:
    """`async with Proxy(server_url, socket_path) as proxy:` then give processes `proxy.url`.

    Passes everything on, by default: `delay_s` holds every reply back, `loses` chooses
    replies that are swallowed, after which the connection is cut, as when a reply is lost on the
    way. Without a socket path it listens on a loopback port, with `tls` as an encrypted one.
    """

    def __init__(
        self, server_url: str, socket_path: Path | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.delay_s = 0.0
        self.loses: Loses | None = None
        self.num_lost = 0
        self.connections: list[Connection] = []
        self._blackholed: Callable[[Connection], bool] | None = None
        self._resets = False
        self._target = unquote(server_url.removeprefix("unix://"))
        self._socket_path = socket_path
        self._tls = tls
        self._is_closing = False
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        if self._socket_path is not None:
            self._server = await asyncio.start_unix_server(self._serve, str(self._socket_path))
        else:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", free_port(), ssl=self._tls
            )
        return self

    @property
    def url(self) -> str:
        if self._socket_path is not None:
            return "unix://" + quote(str(self._socket_path))
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"{'redis' if self._tls is None else 'rediss'}://127.0.0.1:{port}/0"

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._is_closing = True
        self.heal()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Ends all connections that there are now."""
        for connection in list(self.connections):
            connection.cut()

    @contextlib.contextmanager
    def resetting(self) -> Iterator[None]:
        """Inside the block every connection is reset, a new one as soon as it was accepted."""
        assert self._socket_path is None, "a unix socket knows no reset"
        self._resets = True
        try:
            for connection in list(self.connections):
                connection.reset()
            yield
        finally:
            self._resets = False

    def partition(self) -> None:
        """Nothing comes through any more, in either direction, on old connections and new ones.
        Nobody is told. What is sent meanwhile arrives after `heal`, as TCP would send it again."""
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    def blackhole_all(self, which: Callable[[Connection], bool] | None) -> None:
        """Both sides of these connections, and of such to come, hear nothing any more, not even an
        end. None: connections to come are spared; what was swallowed stays so."""
        self._blackholed = which
        for connection in self.connections:
            self._swallow(connection)

    def _swallow(self, connection: Connection) -> None:
        if self._blackholed is not None and self._blackholed(connection):
            connection.is_blackholed = True

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
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._resets:
                _reset(client)
                return
            await self._passes.wait()
            if not self._is_closing:
                await self._connect(reader, client)
        finally:
            self._tasks.discard(task)
            client.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            from_server, server = await asyncio.open_unix_connection(self._target)
        except OSError:
            return
        connection = Connection(client, server)
        self.connections.append(connection)
        try:
            with contextlib.suppress(OSError):
                await self._pass_both_ways(connection, reader, from_server)
        finally:
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
                await self._passes.wait()
                connection.is_listening |= b"SUBSCRIBE" in data
                self._swallow(connection)
                if not connection.is_blackholed:
                    connection.server.write(data)
                    await connection.server.drain()

        async def down() -> None:
            while data := await from_server.read(CHUNK):
                await self._passes.wait()
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
