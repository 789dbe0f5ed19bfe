"""Which replies of the server confirm a subscription, and which of them end the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.backoff import Backoff
from shared.redis import pubsub
from shared.redis.pubsub import Subscriber
from tests.support.polling import until

CHANNEL = "ch"


class FakeConnection:
    """Notes what is sent; the server's replies are put in by the test, in the server's order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, ...]] = []
        self.num_read = 0
        self._replies: asyncio.Queue[list[object] | None] = asyncio.Queue()

    async def connect(self) -> None: ...
    async def disconnect(self, *, nowait: bool = False) -> None: ...

    async def send_command(self, *command: str, check_health: bool = True) -> None:
        self.sent.append(command)

    async def read_response(self, *, disconnect_on_error: bool = True) -> list[object]:
        reply = await self._replies.get()
        if reply is None:
            raise RedisConnectionError("closed")
        self.num_read += 1
        return reply

    async def says(self, kind: str, data: object = 1) -> None:
        """Returns when the reply has been dispatched, or has ended the connection."""
        before = self.num_read
        self._replies.put_nowait([kind.encode(), CHANNEL.encode(), data])
        await until(lambda: self.num_read > before)
        await asyncio.sleep(0)

    def breaks(self) -> None:
        self._replies.put_nowait(None)


class FakeListener:
    def __init__(self) -> None:
        self.num_confirmed = 0
        self.heard: list[bytes] = []

    def on_confirmed(self) -> None:
        self.num_confirmed += 1

    def on_message(self, data: bytes) -> None:
        self.heard.append(data)


class Bench:
    """A subscriber, and every connection that it made so far."""

    def __init__(self, prefix: str) -> None:
        self.connections: list[FakeConnection] = []
        self.subscribe, self.unsubscribe = f"{prefix}subscribe", f"{prefix}unsubscribe"
        self.message = f"{prefix}message"
        self.subscriber = Subscriber(self._connect, is_sharded=bool(prefix))

    def _connect(self) -> AbstractConnection:
        self.connections.append(FakeConnection())
        return self.connections[-1]  # type: ignore[return-value]

    async def connected(self, number: int = 1) -> FakeConnection:
        """Returns the connection of this number, once commands are sent over it."""
        await until(lambda: len(self.connections) >= number)
        connection = self.connections[number - 1]
        other = FakeListener()
        while not connection.sent:
            await self.subscriber.add("other", other)
            await self.subscriber.remove("other", other)
            await asyncio.sleep(0.001)
        return connection

    @property
    def reconnects(self) -> int:
        return self.subscriber.reconnects


@asynccontextmanager
async def running(prefix: str) -> AsyncIterator[Bench]:
    bench = Bench(prefix)
    bench.subscriber.start()
    try:
        yield bench
    finally:
        await bench.subscriber.aclose()


@pytest.fixture(params=["", "s"], ids=["one server", "cluster"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with running(request.param) as opened:
        yield opened


async def left_and_subscribed_again(bench: Bench) -> tuple[FakeConnection, FakeListener]:
    """What two refused requests of one idempotency key send within one round trip."""
    connection = await bench.connected()
    connection.sent.clear()
    gone, listener = FakeListener(), FakeListener()
    await bench.subscriber.add(CHANNEL, gone)
    await bench.subscriber.remove(CHANNEL, gone)
    await bench.subscriber.add(CHANNEL, listener)
    commands = [bench.subscribe, bench.unsubscribe, bench.subscribe]
    assert connection.sent == [(command.upper(), CHANNEL) for command in commands]
    return connection, listener


async def test_the_confirmation_of_a_subscription_that_was_left_confirms_no_later_one(
    bench: Bench,
) -> None:
    connection, listener = await left_and_subscribed_again(bench)
    await connection.says(bench.subscribe)
    assert listener.num_confirmed == 0
    await connection.says(bench.unsubscribe)
    assert (listener.num_confirmed, bench.reconnects) == (0, 0)
    await connection.says(bench.subscribe)
    assert (listener.num_confirmed, bench.reconnects) == (1, 0)
    await bench.subscriber.confirmed(CHANNEL, listener)
    await connection.says(bench.message, b"frame")
    assert listener.heard == [b"frame"]
    await bench.subscriber.remove(CHANNEL, listener)
    await connection.says(bench.unsubscribe)
    assert CHANNEL not in bench.subscriber._leaving, "nothing is kept of a channel that was left"


async def test_a_channel_left_twice_is_confirmed_by_the_last_subscription_alone(
    bench: Bench,
) -> None:
    connection, gone = await left_and_subscribed_again(bench)
    await bench.subscriber.remove(CHANNEL, gone)
    listener = FakeListener()
    await bench.subscriber.add(CHANNEL, listener)
    for kind in [bench.subscribe, bench.unsubscribe] * 2:
        await connection.says(kind)
        assert (listener.num_confirmed, bench.reconnects) == (0, 0)
    await connection.says(bench.subscribe)
    assert (listener.num_confirmed, bench.reconnects) == (1, 0)


async def test_a_channel_that_the_server_takes_away_ends_the_connection() -> None:
    async with running("s") as bench:
        connection, _ = await left_and_subscribed_again(bench)
        for kind in ("ssubscribe", "sunsubscribe", "ssubscribe"):
            await connection.says(kind)
        await connection.says("sunsubscribe")  # nobody has asked for this one
        await until(lambda: bench.reconnects == 1)
        successor = await bench.connected(2)
        assert successor.sent[0] == ("SSUBSCRIBE", CHANNEL)


async def test_a_new_connection_owes_no_answer_to_what_was_sent_over_the_last(
    bench: Bench,
) -> None:
    connection, listener = await left_and_subscribed_again(bench)
    connection.breaks()
    successor = await bench.connected(2)
    await successor.says(bench.subscribe)
    assert (listener.num_confirmed, bench.reconnects) == (1, 1)


async def test_the_waits_for_a_server_that_is_away_grow_and_differ_between_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[list[float]] = []

    class Recorded(Backoff):
        async def wait(self) -> None:
            waits[-1].append(self.next_s())
            await asyncio.sleep(0)

    def refuse() -> AbstractConnection:
        connection = FakeConnection()
        connection.connect = AsyncMock(side_effect=ConnectionRefusedError)  # type: ignore[method-assign]
        return connection  # type: ignore[return-value]

    monkeypatch.setattr(pubsub, "Backoff", Recorded)
    for _ in range(2):
        waits.append([])
        subscriber = Subscriber(refuse)
        subscriber.start()
        await until(lambda: len(waits[-1]) >= 6)
        await subscriber.aclose()
    for longest_s, *of_processes in zip((0.1, 0.2, 0.4, 0.8, 1.0, 1.0), *waits, strict=False):
        assert all(longest_s / 2 <= wait_s <= longest_s for wait_s in of_processes)
        assert len(set(of_processes)) == 2
