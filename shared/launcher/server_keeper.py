"""ServerKeeper: the private Redis is started again when it dies; its file has kept the jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from shared.launcher.exit_words import how_it_ended
from shared.launcher.restarts import GaveUp, Restarts
from shared.transport.private_server import ServerError

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
