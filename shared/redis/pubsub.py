"""Subscriber: one supervised pub/sub connection for all channels of a process.

With sentinels and in a cluster that connection leads to the primary; a channel that
the server removes (its slot has moved) ends it like any other loss.

redis-py's own pub/sub reconnects silently and never notices a half-open connection. Here one task
owns the connection: it reconnects, subscribes again, notifies every listener of each confirmation,
and drops a connection that has been silent for `dead_s` in spite of its PINGs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.backoff import Backoff
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait

log = logging.getLogger(__name__)

PING_S = 1.0
DEAD_S = 3.0
CONFIRM_TIMEOUT_S = 3.0
# All processes of a server lose it in the same moment; the jitter spreads their return.
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0
RETRY_JITTER = 0.5
SUBSCRIBE_CHUNK = 256

_BROKEN = (RedisError, OSError, EOFError)


class NotConfirmed(Exception):
    """The server did not confirm a subscription in time; the sentence holds no address."""


class Listener(Protocol):
    """Called from the reading task: never awaits, never raises."""

    def on_confirmed(self) -> None:
        """Handles the server's confirmation of the subscription: earlier messages may be lost."""
        ...

    def on_message(self, data: bytes) -> None: ...


class _Channel:
    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.confirmed = asyncio.Event()


class Subscriber:
    """Delivers messages to listeners in the server's order, at most once each."""

    def __init__(
        self,
        new_connection: Callable[[], AbstractConnection],
        *,
        is_sharded: bool = False,
        ping_s: float = PING_S,
        dead_s: float = DEAD_S,
    ) -> None:
        """`is_sharded`: the channels are a cluster's, all in the slot of one node."""
        self._new_connection = new_connection
        self._subscribe = "SSUBSCRIBE" if is_sharded else "SUBSCRIBE"
        self._unsubscribe = "SUNSUBSCRIBE" if is_sharded else "UNSUBSCRIBE"
        self._ping_s = ping_s
        self._dead_s = dead_s
        self._channels: dict[str, _Channel] = {}
        self._leaving: Counter[str] = Counter()  # UNSUBSCRIBEs of a channel without a reply yet
        self._connection: AbstractConnection | None = None
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""
        self._heard_s = 0.0  # when the server last sent anything
        self._outage = RateLimitedOutageLog(
            log,
            failing="lost the pub/sub connection; reconnecting",
            recovered="reconnected to pub/sub",
            of=STORE,
        )
        self.reconnects = 0

    def start(self) -> None:
        """Starts to connect. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._supervise(), name="redis-subscriber")

    async def aclose(self) -> None:
        """Closes the connection. Raises the reading task's error, if it had ended with a fault."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        if not task.cancelled() and (error := task.exception()):
            raise error

    async def add(self, channel: str, listener: Listener) -> None:
        """Adds a listener, called from the server's confirmation on, now or after an outage."""
        self.start()
        state = self._channels.get(channel)
        if state is None:
            state = self._channels[channel] = _Channel()
            state.listeners.append(listener)
            try:
                await self._send(self._subscribe, channel)
            except asyncio.CancelledError:
                await self.remove(channel, listener)
                raise
        else:
            state.listeners.append(listener)
            if state.confirmed.is_set():
                listener.on_confirmed()

    async def confirmed(self, channel: str, listener: Listener) -> None:
        """Waits until the server confirmed the channel. If it raises NotConfirmed, the listener
        has been removed."""
        state = self._channels[channel]
        if state.confirmed.is_set():
            return
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await state.confirmed.wait()
        except TimeoutError:
            await self.remove(channel, listener)
            raise NotConfirmed(f"the subscription was not confirmed{self._trouble}") from None
        except asyncio.CancelledError:
            await self.remove(channel, listener)
            raise

    async def remove(self, channel: str, listener: Listener) -> None:
        """Removes a listener; the last one of a channel unsubscribes. Idempotent."""
        state = self._channels.get(channel)
        if state is None or listener not in state.listeners:
            return
        state.listeners.remove(listener)
        if not state.listeners:
            del self._channels[channel]
            await self._send(self._unsubscribe, channel)

    async def _send(self, *command: str) -> None:
        async with self._sending:
            connection = self._connection
            if connection is None:
                return  # subscribed with all others once connected
            if command[0] == self._unsubscribe:
                self._leaving[command[1]] += 1
            try:
                await connection.send_command(*command, check_health=False)
            except _BROKEN as error:
                # The reading task fails too; the next connection subscribes again.
                log.debug("failed to send a pub/sub command", extra={"error": type(error).__name__})

    async def _supervise(self) -> None:
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S, jitter=RETRY_JITTER)
        while True:
            connection = self._new_connection()
            try:
                async with asyncio.timeout(self._dead_s):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await self._open(connection)
                backoff.reset()
                await self._listen(connection)
            except _BROKEN as error:
                self._trouble = f" ({type(error).__name__})"
                self._outage.failed(error=type(error).__name__)
            finally:
                self._connection = None
                for state in self._channels.values():
                    state.confirmed.clear()
                with contextlib.suppress(*_BROKEN):
                    await connection.disconnect(nowait=True)
            self.reconnects += 1
            await backoff.wait()

    async def _open(self, connection: AbstractConnection) -> None:
        async with self._sending:
            self._leaving.clear()  # the connection that owed these replies is gone
            names = list(self._channels)
            for at in range(0, len(names), SUBSCRIBE_CHUNK):
                chunk = names[at : at + SUBSCRIBE_CHUNK]
                await connection.send_command(self._subscribe, *chunk, check_health=False)
            self._connection = connection

    async def _listen(self, connection: AbstractConnection) -> None:
        """Reads until the connection breaks. Raises RedisError or OSError.

        One clock watches the silence: a time limit on each read would cost more than the read.
        """
        clock = asyncio.get_running_loop().time
        self._heard_s = clock()
        reading = asyncio.create_task(self._read(connection), name="redis-subscriber-reading")
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=self._ping_s)
                silent_s = clock() - self._heard_s
                if silent_s >= self._dead_s:
                    raise RedisConnectionError("no reply to PING")
                if silent_s >= self._ping_s and not reading.done():
                    await self._send("PING")
            reading.result()
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()  # already raised, or follows the one that is

    async def _read(self, connection: AbstractConnection) -> None:
        clock = asyncio.get_running_loop().time
        while True:  # without a time limit: the profile sets none
            reply = await connection.read_response(disconnect_on_error=False)
            self._heard_s = clock()
            self._trouble = ""
            self._outage.succeeded()  # not before: a half-open connection opens, and sends nothing
            self._dispatch(reply)

    def _dispatch(self, reply: Any) -> None:
        if not isinstance(reply, list) or len(reply) != 3:
            return  # the reply to a PING
        kind, name, data = reply
        channel = name.decode() if isinstance(name, bytes) else str(name)
        is_message = kind in (b"message", b"smessage")
        if not is_message and self._is_outdated(kind, channel):
            return
        state = self._channels.get(channel)
        if state is None:
            return
        if is_message:
            for listener in list(state.listeners):
                listener.on_message(data)
        elif kind in (b"subscribe", b"ssubscribe"):
            state.confirmed.set()
            for listener in list(state.listeners):
                listener.on_confirmed()
        elif kind == b"sunsubscribe" and state.confirmed.is_set():
            # Not the reply to an UNSUBSCRIBE: those are counted.
            raise RedisConnectionError("the channel's slot has moved")

    def _is_outdated(self, kind: bytes, channel: str) -> bool:
        """Returns whether a reply concerns a subscription that was left, and perhaps made again
        since: until the reply to the channel's last UNSUBSCRIBE."""
        num_leaving = self._leaving[channel]
        if num_leaving and kind in (b"unsubscribe", b"sunsubscribe"):
            self._leaving[channel] -= 1
            if num_leaving == 1:
                del self._leaving[channel]
        return num_leaving > 0
