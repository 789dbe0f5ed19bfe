"""A connection that leads to the partition's home, wherever that is when it connects."""

from __future__ import annotations

from typing import Any

from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.transport.home import Home
from shared.transport.server_connection import TcpConnection, TlsConnection

# MovedError is an AskError, MasterDownError a ClusterDownError. ASK and TRYAGAIN: the slot is being
# moved key by key; nothing of it can be used before all of it has arrived.
_ELSEWHERE = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)


class HomedConnection(TcpConnection):
    """Looks for its home each time it connects, and notices when it is at a former one.

    A server that says it is not (any more) the one, or a home that another connection has found
    elsewhere, is a ConnectionError: retried where the profile retries, then at the new home.
    """

    def __init__(self, *, home: Home, **options: Any) -> None:
        super().__init__(**options)
        self._home = home

    async def _connect(self) -> None:
        self.host, self.port = await self._home.locate()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self.is_connected and self._home.latest != (self.host, self.port):
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the partition's home has moved")
        await super().send_packed_command(command, check_health)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except ResponseError as error:
            # A primary that lost its replicas may have been replaced without knowing it.
            if not isinstance(error, _ELSEWHERE) and not str(error).startswith("NOREPLICAS"):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"not at home ({type(error).__name__})") from error


class HomedSSLConnection(HomedConnection, TlsConnection):
    """The same over TLS."""
