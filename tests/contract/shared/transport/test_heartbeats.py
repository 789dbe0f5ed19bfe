"""Leases have a way of their own to the server: nothing else delays a heartbeat."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import HeartbeatReply, WorkerReport
from tests.chaos.harness.proxy import Proxy
from tests.support.jobs import MODEL
from tests.support.transport_steps import Steps

FRONTEND = "fe-x"


def a_heartbeat(worker_id: str = "w1") -> WorkerReport:
    return WorkerReport(worker_id, 20_000, (MODEL,), {"step": 0}, ())


@pytest.fixture
async def saturated(redis_url: str, namespace: str) -> Any:
    """A transport all of whose command connections are taken."""
    transport = await open_transport(redis_url, namespace=namespace)
    pool: Any = transport.connections.commands.connection_pool
    taken = [await pool.get_connection() for _ in range(pool.max_connections)]
    yield transport
    for connection in taken:
        await pool.release(connection)
    await transport.aclose()


async def test_a_worker_heartbeats_while_all_command_connections_are_taken(
    saturated: RedisTransport,
) -> None:
    await saturated.queue.heartbeat(a_heartbeat())
    with pytest.raises(TransportError):
        await saturated.store.ping()


async def test_a_frontend_heartbeats_while_all_command_connections_are_taken(
    saturated: RedisTransport,
) -> None:
    await saturated.store.frontend_heartbeat(FRONTEND, 20_000)
    lease = saturated.keys.frontend(FRONTEND)
    assert await saturated.connections.heartbeat.pttl(lease) > 10_000


async def test_a_heartbeat_that_was_given_up_does_not_answer_the_next_one(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    async with Proxy(redis_url, tmp_path / "proxy.sock") as proxy:
        transport = await open_transport(proxy.url, namespace=namespace)
        steps = Steps(transport)
        await transport.queue.setup([MODEL])
        running = await steps.running()
        listed = WorkerReport(
            "w1", 20_000, (MODEL,), {"step": 0}, ((running.job.job_id, 1), ("0-no", 1))
        )
        assert await transport.queue.heartbeat(listed) == HeartbeatReply([], ["0-no"], [])
        proxy.delay_s = 0.5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await transport.queue.heartbeat(listed)
        proxy.delay_s = 0
        assert await transport.queue.heartbeat(a_heartbeat()) == HeartbeatReply([], [], [])
        await transport.aclose()
