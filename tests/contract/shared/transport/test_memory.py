"""A full server: admission is the only thing that fails; what runs can end and make room."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.messages import JobState, OnDisconnect
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.jobs import Restored
from shared.transport.ports.queue import AppendStatus
from tests.support.jobs import LIMITS, Stream, make_job
from tests.support.transport_steps import FINISHED, Steps


@pytest.fixture(scope="module")
def own_server() -> object:
    server = PrivateServer()
    yield server.start()
    server.stop()


@pytest.fixture
async def full(own_server: str) -> AsyncIterator[RedisTransport]:
    opened = await open_transport(own_server)
    yield opened
    await opened.connections.commands.config_set("maxmemory", 0)
    await opened.aclose()


async def fill(steps: Steps) -> None:
    await steps.redis.config_set("maxmemory", 1)


async def test_above_maxmemory_only_admission_and_claims_are_refused(full: RedisTransport) -> None:
    steps = Steps(full)
    stream = Stream(await steps.running())
    other = await steps.submit()
    waiting = await steps.submit()
    released = await steps.submit()
    (held,) = [d for d in await steps.pull("w1", 3) if d.job == released] or [None]
    assert held is not None
    await steps.submit()
    await steps.store.frontend_heartbeat("fe1", 5_000)
    await fill(steps)

    with pytest.raises(QueueFull) as caught:
        await steps.store.submit(make_job(), LIMITS, "")
    assert caught.value.scope == "memory"
    assert await steps.pull("w1") == []

    assert list(await steps.heartbeat("w1", running=[(stream.job_id, 1)])) == []
    assert (await steps.say("w1", stream, [5], "a")).status is AppendStatus.OK
    assert (await steps.say("w1", stream, [6], "b", end=FINISHED)).status is AppendStatus.OK
    assert await steps.queue.release("w1", released.job_id, held.attempt)
    (held,) = await steps.queue.recover("w1", 8)
    assert held.job == released
    await steps.queue.crashed("w1", [(released.job_id, held.attempt)])
    (held,) = await steps.queue.recover("w1", 8)
    assert (held.job, held.crashes) == (released, 1)
    await steps.store.frontend_heartbeat("fe1", 50_000)  # a reader's frontend stays alive
    assert await steps.redis.pttl(steps.keys.frontend("fe1")) > 5_000
    for job in (other, waiting):
        result = await steps.store.cancel(job.job_id, "cancelled")
        assert result is not None
        assert result.state is JobState.CANCELLED
    assert await steps.store.reap() == 0
    (warning,) = await full.check()
    assert "maxmemory" in warning
    await steps.assert_counters_true()

    await steps.redis.config_set("maxmemory", 0)
    assert len(await steps.pull("w1")) == 1


async def test_the_reader_of_an_ended_job_may_leave_above_maxmemory(full: RedisTransport) -> None:
    steps = Steps(full)
    await steps.redis.flushall()  # of the test before
    delivery = await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.GRACE)
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    job_id, texts = delivery.job.job_id, f"{steps.keys.prefix}texts:default"
    before = await steps.redis.zscore(texts, job_id)
    await fill(steps)
    await steps.store.detach(job_id, "fe1#1")
    assert before - await steps.redis.zscore(texts, job_id) > 500_000


async def test_a_lost_job_is_refused_above_maxmemory_and_may_be_put_back_later(
    full: RedisTransport,
) -> None:
    steps = Steps(full)
    delivery = await steps.running()
    assert delivery.snapshot is not None
    job_id = delivery.job.job_id
    await steps.redis.flushall()
    await steps.worker("w1")
    await fill(steps)

    async def put_back() -> Restored:
        assert delivery.snapshot is not None
        return await steps.queue.restore("w1", job_id, delivery.attempt, delivery.snapshot, 10)

    assert await put_back() is Restored.NO_MEMORY
    assert not await steps.redis.exists(steps.keys.job(job_id))
    await steps.redis.config_set("maxmemory", 0)
    assert await put_back() is Restored.RESTORED
    assert (await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)).status == "ok"
    await steps.assert_counters_true()
