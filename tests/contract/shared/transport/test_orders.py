"""What an operator orders: workers that drain, and models whose queues are paused."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import WorkerReport
from shared.transport.ports.registry import Order, Ordered, TooManyPaused
from tests.support.jobs import MODEL
from tests.support.transport_steps import Steps

WHO = "key-of-an-operator"


async def served(steps: Steps, *workers: str) -> None:
    for worker in workers or ("w1",):
        await steps.worker(worker)
    await steps.queue.announce(MODEL, b"{}", {})


async def test_a_drained_worker_takes_nothing_before_it_has_read_the_order(steps: Steps) -> None:
    await served(steps, "w1", "w2")
    running = await steps.running("w1")
    assert await steps.registry.order("w1", Order.DRAIN) is Ordered.OK
    job = await steps.submit()
    assert await steps.pull("w1") == []
    assert await steps.queue.oversubscribe("w1", 4, ()) == []
    (taken,) = await steps.pull("w2")
    assert taken.job.job_id == job.job_id
    assert (await steps.store.get(running.job.job_id)).state is JobState.RUNNING


async def test_an_order_of_a_newer_release_is_one_to_take_nothing(steps: Steps) -> None:
    await served(steps)
    await steps.submit()
    await steps.redis.set(steps.keys.order("w1"), "newer")
    assert await steps.pull("w1") == []
    await steps.registry.order("w1", Order.SERVE)
    assert len(await steps.pull("w1")) == 1


async def test_a_drained_worker_recovers_no_job(steps: Steps) -> None:
    await served(steps, "w1", "w2")
    delivery = await steps.running("w2")
    await steps.queue.release("w2", delivery.job.job_id, delivery.attempt)
    await steps.registry.order("w1", Order.DRAIN)
    assert await steps.queue.recover("w1", 4) == []
    (recovered,) = await steps.queue.recover("w2", 4)
    assert (recovered.job.job_id, recovered.attempt) == (delivery.job.job_id, 2)


@pytest.mark.parametrize("order", [Order.DRAIN, Order.EXIT])
async def test_a_heartbeat_brings_the_order_and_shows_the_drain(steps: Steps, order: Order) -> None:
    await served(steps)
    report = WorkerReport("w1", 20_000, (MODEL,), {}, ())
    assert (await steps.queue.heartbeat(report)).order is None
    await steps.registry.order("w1", order)
    (worker,) = await steps.registry.workers()
    assert (worker.draining, worker.order) == (True, order)
    assert (await steps.queue.heartbeat(report)).order is order
    (worker,) = await steps.registry.workers()
    assert (worker.draining, worker.order) == (True, order), "the report was of before the order"


async def test_a_worker_that_is_told_to_serve_takes_jobs_again(steps: Steps) -> None:
    await served(steps)
    await steps.registry.order("w1", Order.DRAIN)
    job = await steps.submit()
    assert await steps.pull("w1") == []
    assert await steps.registry.order("w1", Order.SERVE) is Ordered.OK
    (taken,) = await steps.pull("w1")
    assert taken.job.job_id == job.job_id
    assert (await steps.queue.heartbeat(WorkerReport("w1", 20_000, (MODEL,), {}, ()))).order is (
        Order.SERVE
    )


async def test_an_order_needs_a_live_worker_whose_release_reads_it(
    steps: Steps, transport: RedisTransport
) -> None:
    assert await steps.registry.order("w1", Order.DRAIN) is Ordered.GONE
    await served(steps)
    await transport.connections.commands.hdel(transport.keys.worker("w1"), "order")
    assert await steps.registry.order("w1", Order.DRAIN) is Ordered.OLD
    (worker,) = await steps.registry.workers()
    assert (worker.draining, worker.order) == (False, None)


async def test_orders_end_with_their_worker_and_by_themselves(
    steps: Steps, transport: RedisTransport
) -> None:
    await served(steps)
    await steps.registry.order("w1", Order.DRAIN)
    key = transport.keys.order("w1")
    assert 0 < await transport.connections.commands.pttl(key) <= 86_400_000
    await steps.queue.retire("w1", returns=True)
    assert await transport.connections.commands.exists(key), "not heard by it, perhaps"
    await steps.queue.retire("w1")
    assert not await transport.connections.commands.exists(key)


async def test_a_paused_queue_accepts_jobs_and_gives_them_to_nobody(steps: Steps) -> None:
    await served(steps)
    assert await steps.registry.pause(MODEL, WHO) is True
    assert await steps.registry.pause(MODEL, "another") is False
    job = await steps.submit()
    assert await steps.pull("w1") == []
    assert await steps.queue.pull("w1", 4, 30) == []
    assert await steps.queue.oversubscribe("w1", 4, ()) == []
    record = await steps.store.get(job.job_id)
    assert record is not None
    assert (record.state, record.queue_position) == (JobState.QUEUED, 0)
    assert await steps.registry.resume(MODEL) is True
    assert await steps.registry.resume(MODEL) is False
    (taken,) = await steps.pull("w1")
    assert taken.job.job_id == job.job_id


async def test_jobs_of_a_dead_worker_wait_while_their_queue_is_paused(steps: Steps) -> None:
    await served(steps, "w1", "w2")
    delivery = await steps.running("w1")
    await steps.registry.pause(MODEL, WHO)
    await steps.queue.declare_dead("w1")
    assert await steps.queue.recover("w2", 4) == []
    await steps.registry.resume(MODEL)
    (recovered,) = await steps.queue.recover("w2", 4)
    assert (recovered.job.job_id, recovered.attempt) == (delivery.job.job_id, 2)


async def test_a_queue_timeout_passes_while_the_queue_is_paused(
    steps: Steps, transport: RedisTransport
) -> None:
    await served(steps)
    await steps.registry.pause(MODEL, WHO)
    job = await steps.submit(queue_timeout_ms=1)
    while not await steps.store.reap():
        pass
    record = await steps.store.get(job.job_id)
    assert record is not None
    assert (record.state, record.reason) == (JobState.EXPIRED, "queue_timeout")


async def test_another_model_of_the_same_worker_is_served_while_one_is_paused(
    steps: Steps,
) -> None:
    await steps.worker("w1", (MODEL, "other"))
    await steps.queue.announce(MODEL, b"{}", {})
    await steps.registry.pause(MODEL, WHO)
    await steps.submit()
    job = await steps.submit(model="other")
    (taken,) = await steps.pull("w1")
    assert taken.job.job_id == job.job_id


async def test_a_new_job_of_an_open_queue_is_taken_at_once_while_another_queue_is_paused(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.pulls.HELD_S", 60.0)
    await steps.worker("w1", (MODEL, "other"))
    await steps.queue.announce(MODEL, b"{}", {})
    await steps.registry.pause(MODEL, WHO)
    async with asyncio.timeout(30):
        pulling = asyncio.create_task(steps.queue.pull("w1", 4, 60_000))
        lease = steps.keys.worker("w1")
        while not await steps.redis.hexists(lease, "pull_ms"):  # it waits
            await asyncio.sleep(0)
        job = await steps.submit(model="other")
        (taken,) = await pulling
    assert taken.job.job_id == job.job_id


async def test_only_a_known_model_can_be_paused(steps: Steps, transport: RedisTransport) -> None:
    assert await steps.registry.pause("never announced", WHO) is None
    assert not await transport.connections.commands.exists(transport.keys.paused)


async def test_a_thousand_queues_may_be_paused(steps: Steps) -> None:
    await served(steps)
    others = {f"m{index}": f"1|{WHO}" for index in range(1000)}
    await steps.redis.hset(steps.keys.paused, mapping=others)
    with pytest.raises(TooManyPaused):
        await steps.registry.pause(MODEL, WHO)
    await steps.registry.resume("m0")
    assert await steps.registry.pause(MODEL, WHO) is True


async def test_the_state_names_who_paused_a_queue_and_waiting_work_is_no_sign_of_slow_workers(
    steps: Steps, transport: RedisTransport
) -> None:
    await served(steps)
    await steps.registry.pause(MODEL, WHO)
    await steps.submit()
    await steps.registry.workers()
    stats = await steps.registry.queue_stats()
    assert stats.paused[MODEL].by == WHO
    assert stats.paused[MODEL].since_ms > 0
    assert steps.registry._drains.of(MODEL)._at_s is None, "no time of the measured rate"
    assert (await steps.registry.models())[MODEL].is_paused


async def test_a_pause_lives_on_as_long_as_somebody_looks(
    steps: Steps, transport: RedisTransport
) -> None:
    await served(steps)
    await steps.registry.pause(MODEL, WHO)
    redis, key = transport.connections.commands, transport.keys.paused
    await redis.pexpire(key, 1000)
    await steps.store.reap()
    assert await redis.pttl(key) > 600_000_000
