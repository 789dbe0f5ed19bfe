"""ServerKeeper: the private Redis is started again when it dies; its file has kept the jobs."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from redis.exceptions import AuthenticationError

from shared.launcher.processes import GaveUp, Restarts, how_it_ended
from shared.launcher.redis_server import ServerError
from shared.logs import Outage
from shared.transport.connect import RedisTransport
from shared.transport.ports.jobs import TransportError

POLL_S = 0.1


class Server(Protocol):
    """What is needed of a PrivateServer."""

    version: str

    @property
    def exit_code(self) -> int | None: ...
    def respawn(self) -> None: ...
    def answers(self) -> bool: ...
    def last_words(self) -> str: ...


class ServerKeeper:
    """Supervises a server that was started already. Workers and frontends wait meanwhile."""

    def __init__(self, server: Server, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say

    async def supervise(self) -> None:
        """Until cancelled. Raises GaveUp. Run it in the thread that started the server: the server
        ends with that thread."""
        server = self._server
        restarts = Restarts(f"the private {server.version}")
        began_s = time.monotonic()
        while True:
            while server.exit_code is None:
                await asyncio.sleep(POLL_S)
            try:
                backoff_s = restarts.backoff_s(time.monotonic() - began_s)
            except GaveUp as error:
                raise GaveUp(f"{error}: {server.last_words()}", error.exit_code) from None
            how = how_it_ended(server.exit_code)
            self._say(f"the private {server.version} ended ({how}); starting it again")
            await asyncio.sleep(backoff_s)
            began_s = time.monotonic()
            try:
                server.respawn()
            except ServerError as error:
                raise GaveUp(str(error), 1) from error
            while server.exit_code is None:
                if await asyncio.to_thread(server.answers):
                    self._say(f"the private {server.version} is back, with the jobs of its file")
                    break
                await asyncio.sleep(POLL_S)


# RedisWatch: tells the person at the terminal when the given Redis does not answer.
#
# Nothing ends because of it. Workers load their model and frontends listen meanwhile, and all of
# them go on by themselves when it comes: a Redis that is started later, or again, is an ordinary
# thing.

LOOK_S = 1.0

_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (AuthenticationError, "it refuses the user or password"),
    (ConnectionRefusedError, "the connection is refused"),
    (FileNotFoundError, "there is no such socket"),
    (PermissionError, "the socket must not be opened"),
    (socket.gaierror, "the host's name is not known"),
    (ssl.SSLCertVerificationError, "its certificate is not trusted"),
    (ssl.SSLError, "TLS failed"),
    (TimeoutError, "it does not answer"),
)


class RedisWatch:
    """Looks once a second. `trouble` is a sentence while it is away, None otherwise."""

    def __init__(self, transport: RedisTransport, say: Callable[[str], None]) -> None:
        self._transport = transport
        self._say = say
        self.trouble: str | None = None

    async def run(self) -> None:
        """Until cancelled."""
        outage = Outage()
        while True:
            try:
                await self._transport.store.ping()
            except TransportError as error:
                self.trouble = f"Redis at {self._transport.url} cannot be reached: {_reason(error)}"
                if outage.failed() is not None:
                    self._say(f"{self.trouble}. Waiting for it; REDIS_URL says where it is.")
            else:
                self.trouble = None
                outage_s = outage.succeeded()
                if outage_s is not None:
                    self._say(f"Redis answers, after {outage_s:.0f} s")
            await asyncio.sleep(LOOK_S)


def _reason(error: BaseException) -> str:
    """Plain words for what is behind an error; never the library's own, which repeat addresses."""
    causes = list(_chain(error))
    for kind, words in _REASONS:
        if any(isinstance(cause, kind) for cause in causes):
            return words
    return type(causes[-1]).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
