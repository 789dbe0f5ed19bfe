"""The quick pool of connections: answers belong to their commands, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.pool import CommandPool, Commands
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.failures import translated
from shared.transport.ports.jobs import TransportError
from tests.chaos.harness.proxy import Proxy


async def test_each_command_of_an_exchange_has_its_own_reply(transport: RedisTransport) -> None:
    key = transport.keys.meta + ":a-list"
    pool = transport.connections.scripts
    pushed, wrong, length = await pool.exchange(("RPUSH", key, "x"), ("GET", key), ("LLEN", key))
    assert (pushed, length) == (1, 1)
    assert isinstance(wrong, ResponseError)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await pool.execute_command("GET", key)
    assert await pool.execute_command("DEL", key) == 1


async def test_an_exchange_that_was_cancelled_does_not_answer_the_next_one(
    transport: RedisTransport,
) -> None:
    pool = transport.connections.blocking
    waiting = asyncio.create_task(pool.exchange(("BLPOP", "nothing-comes", "5"), ("ECHO", "old")))
    client: Any = transport.connections.commands
    async with asyncio.timeout(30):
        while not any(one["cmd"] == "blpop" for one in await client.client_list()):
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await pool.execute_command("ECHO", "new") == b"new"


@pytest.mark.parametrize("name", ["commands", "heartbeat", "scripts"])
async def test_one_cancel_ends_a_command_at_whatever_step_it_comes(
    transport: RedisTransport, name: str
) -> None:
    """Also as its write has just ended; each cancel drops the connection, so that the next one
    connects anew."""
    client: Commands = getattr(transport.connections, name)
    for num_steps in itertools.count():
        task = asyncio.create_task(client.execute_command("ECHO", "x"))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        if not task.cancel():  # it was done before
            assert await task == b"x"
            break
        await asyncio.wait([task])
        assert task.cancelled(), num_steps
    assert num_steps > 3  # connecting and writing have more


async def test_a_connection_that_the_server_has_closed_is_replaced(
    transport: RedisTransport,
) -> None:
    pool, client = (
        transport.connections.blocking,
        transport.connections.commands,
    )
    first = await pool.execute_command("CLIENT", "ID")
    await client.execute_command("CLIENT", "KILL", "ID", first)  # type: ignore[no-untyped-call]
    async with asyncio.timeout(30):
        while True:
            try:
                second = await pool.execute_command("CLIENT", "ID")
                break
            except RedisConnectionError:  # asked before the end was heard
                continue
    assert second != first


async def test_more_than_its_connections_wait_for_their_turn(transport: RedisTransport) -> None:
    pool = _pool(transport, timeout_s=30.0)
    numbers = [str(number) for number in range(20)]
    replies = await asyncio.gather(*(pool.execute_command("ECHO", word) for word in numbers))
    assert replies == [word.encode() for word in numbers]
    await pool.aclose()


async def test_waiting_too_long_for_a_connection_or_an_answer_is_an_error(
    transport: RedisTransport,
) -> None:
    pool = _pool(transport, timeout_s=1.5)
    waits = [pool.execute_command("BLPOP", "nothing-comes", "10") for _ in range(2)]
    outcomes = await asyncio.gather(*waits, pool.execute_command("PING"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes[:2]] == [RedisTimeoutError, RedisTimeoutError]
    # In that moment the places come free: it got one of them, or was told that there is none.
    assert outcomes[2] == b"PONG" or isinstance(outcomes[2], RedisError)
    assert await pool.execute_command("PING") == b"PONG"
    await pool.aclose()


async def test_after_a_cut_a_command_is_answered_all_the_same(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    async with Proxy(redis_url, tmp_path / "proxy.sock") as proxy:
        transport = await open_transport(proxy.url, namespace=namespace)
        assert await transport.connections.scripts.execute_command("ECHO", "1") == b"1"
        proxy.cut()
        assert await transport.connections.scripts.execute_command("ECHO", "2") == b"2"
        await transport.aclose()


def test_a_reset_is_a_lost_connection_on_the_loop_that_processes_run_on(
    redis_url: str, namespace: str
) -> None:
    """uvloop's own error for it is a RuntimeError; the default loop has none of that kind."""
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_is_reset(redis_url, namespace))


async def _is_reset(redis_url: str, namespace: str) -> None:
    async with Proxy(redis_url) as proxy:
        transport = await open_transport(proxy.url, namespace=namespace)
        connections = transport.connections
        speakers: list[Commands] = [
            connections.commands,
            connections.heartbeat,
            connections.scripts,
            connections.blocking,
        ]
        for speaker in speakers:
            assert await speaker.execute_command("ECHO", "1") == b"1"
        for speaker in speakers:
            with proxy.resetting():
                await asyncio.sleep(0.05)  # the reset arrives while nobody writes or reads
                with pytest.raises(TransportError), translated("echo"):
                    await speaker.execute_command("ECHO", "2")
        for speaker in speakers:
            assert await _answer_after_losses(speaker) == b"3"
        await transport.aclose()


async def _answer_after_losses(speaker: Commands) -> Any:
    """A profile without retries meets its lost connections first, one at each try."""
    for _ in range(5):
        with contextlib.suppress(TransportError), translated("echo"):
            return await speaker.execute_command("ECHO", "3")
    return None


def _pool(transport: RedisTransport, timeout_s: float) -> CommandPool:
    connections = transport.connections
    return CommandPool(
        connections.new_pubsub, max_connections=2, timeout_s=timeout_s, retry=Retry(NoBackoff(), 0)
    )
