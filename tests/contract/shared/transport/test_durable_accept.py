"""What the acceptance of a job may wait for: the server's disk, or its replicas."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from shared.messages import Durability
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.admission import DurabilityFault
from tests.support.polling import until
from tests.support.redis_topologies import HAS_WAITAOF, NO_WAITAOF, Server, free_ports
from tests.support.transport_steps import Steps

needs_waitaof = pytest.mark.skipif(not HAS_WAITAOF, reason="this server is older than 7.2")
FSYNC, REPLICAS = Durability.FSYNC, Durability.REPLICAS


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[RedisTransport]:
    transport = await open_transport(f"redis://127.0.0.1:{server.port}", namespace="durable")
    try:
        yield transport
    finally:
        await transport.aclose()


@pytest.fixture
def new_server() -> Iterator[object]:
    with tempfile.TemporaryDirectory(prefix="penstock-durable-") as directory, ExitStack() as stack:

        def make(*options: str) -> Server:
            (port,) = free_ports(1)
            server = Server(Path(directory), f"server-{port}", port, *options)
            stack.callback(server.close)
            server.start()
            return server

        yield make


async def confirmed(
    transport: RedisTransport, job_id: str, durability: Durability, timeout_s: float = 5.0
) -> bool:
    return await transport.durability.confirm("job", [job_id], durability, 1, timeout_s)


@needs_waitaof
async def test_a_confirmed_job_says_so_and_one_that_is_not_there_is_not_confirmed(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    assert await steps.transport.durability.durability_fault(FSYNC, 1) is None
    await steps.transport.connections.commands.script_flush()
    assert await confirmed(steps.transport, job.job_id, FSYNC)
    record = await steps.record(job.job_id)
    assert record.durability is FSYNC
    assert not await confirmed(steps.transport, "0-nobody", FSYNC)
    assert await steps.hash("0-nobody") == {}


@needs_waitaof
async def test_many_jobs_are_confirmed_with_one_wait(steps: Steps) -> None:
    await steps.worker("w1")
    jobs = [(await steps.submit()).job_id for _ in range(8)]
    await steps.transport.connections.commands.script_flush()
    info = steps.transport.connections.commands.info
    calls = (await info("commandstats")).get("cmdstat_waitaof", {"calls": 0})["calls"]
    assert await steps.transport.durability.confirm("job", jobs, FSYNC, 1, 5.0)
    # Twice: the server had forgotten the script at the first time.
    assert (await info("commandstats"))["cmdstat_waitaof"]["calls"] == calls + 2
    for job_id in jobs:
        assert (await steps.hash(job_id))["durability"] == "fsync"
    assert not await steps.transport.durability.confirm("job", [*jobs, "0-nobody"], FSYNC, 1, 5.0)


@needs_waitaof
async def test_fsync_waits_for_the_disk(steps: Steps) -> None:
    """With `appendfsync everysec` the waits of a while cover the time between two syncs."""
    await steps.worker("w1")
    waits_s = []
    for _ in range(5):
        job = await steps.submit()
        begin_s = time.monotonic()
        assert await confirmed(steps.transport, job.job_id, FSYNC)
        waits_s.append(time.monotonic() - begin_s)
    pings_s = []
    for _ in range(9):  # the quickest: any one may wait for a processor that others have
        begin_s = time.monotonic()
        await steps.transport.store.ping()
        pings_s.append(time.monotonic() - begin_s)
    ping_s = min(pings_s)
    print(f"\nfsync: {[round(s, 2) for s in waits_s]} s, a round trip: {ping_s:.4f} s")
    assert max(waits_s) > 20 * ping_s


@needs_waitaof
async def test_a_server_that_never_syncs_confirms_nothing(new_server: object) -> None:
    server = new_server("--appendfsync", "no")  # type: ignore[operator]
    async with opened(server) as transport:
        job = await Steps(transport).submit()
        assert not await confirmed(transport, job.job_id, FSYNC, 0.3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(
            ("--appendonly", "no"), "the server's append-only file is off.", marks=needs_waitaof
        ),
        (
            NO_WAITAOF,
            "the server is older than Redis 7.2 and has no WAITAOF.",
        ),
    ],
)
async def test_a_server_that_cannot_sync_reports_the_reason(
    new_server: object, options: tuple[str, ...], why: str
) -> None:
    server = new_server(*options)  # type: ignore[operator]
    async with opened(server) as transport:
        fault = DurabilityFault(why, is_lasting=True)
        assert await transport.durability.durability_fault(FSYNC, 1) == fault


@pytest.mark.parametrize("durability", [REPLICAS, pytest.param(FSYNC, marks=needs_waitaof)])
async def test_a_server_that_is_a_replica_during_a_failover_may_become_a_primary(
    new_server: object, durability: Durability
) -> None:
    primary, replica = new_server(), new_server()  # type: ignore[operator]
    replica.client.replicaof("127.0.0.1", primary.port)
    async with opened(replica) as transport:
        fault = await transport.durability.durability_fault(durability, 0)
        assert fault is not None
        assert not fault.is_lasting
        replica.client.replicaof("NO", "ONE")
        assert await transport.durability.durability_fault(durability, 0) is None


async def test_replicas_are_waited_for(new_server: object) -> None:
    primary, replica = new_server(), new_server()  # type: ignore[operator]
    async with opened(primary) as transport:
        steps = Steps(transport)
        none = DurabilityFault("the server has 0 of 1 replicas.", is_lasting=False)
        assert await transport.durability.durability_fault(REPLICAS, 1) == none
        replica.client.replicaof("127.0.0.1", primary.port)

        async def has_replica() -> bool:
            return await transport.durability.durability_fault(REPLICAS, 1) is None

        await until(has_replica)
        two = DurabilityFault("the server has 1 of 2 replicas.", is_lasting=False)
        assert await transport.durability.durability_fault(REPLICAS, 2) == two
        job = await steps.submit()
        assert await confirmed(transport, job.job_id, REPLICAS)
        assert replica.client.hget(steps.keys.job(job.job_id), "durability") == b"replicas"
        process = replica._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            other = await steps.submit()
            assert not await confirmed(transport, other.job_id, REPLICAS, 0.3)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert await confirmed(transport, other.job_id, REPLICAS)


@needs_waitaof
async def test_a_confirmed_job_survives_the_loss_of_what_was_not_synced(
    new_server: object, tmp_path: Path
) -> None:
    """What is on the disk at that moment, read by another server, has the job."""
    server = new_server()  # type: ignore[operator]
    async with opened(server) as transport:
        steps = Steps(transport)
        job = await steps.submit()
        assert await confirmed(transport, job.job_id, FSYNC)
        size = server.file_size()
        later = await steps.submit()
        server.kill()
        server.cut_to(size)
        server.start()
        assert (await steps.hash(job.job_id))["durability"] == "fsync"
        assert await steps.hash(later.job_id) == {}
