"""How the jobs that wait divide over the workers that ask for them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import Delivery
from tests.support.jobs import MODEL, Stream
from tests.support.polling import until
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, calls_of, other_process

FAR_MS = 600_000  # no test takes so long
SHORT_MS = 200


async def workers_of(
    transport: RedisTransport, count: int, *, defer_ms: int = FAR_MS, asking_ms: int = FAR_MS
) -> list[Steps]:
    """Workers w0, w1, ... that have asked for work and found none, each a process of its own."""
    found = []
    for at in range(count):
        steps = other_process(transport, defer_ms=defer_ms, asking_ms=asking_ms)
        await steps.worker(f"w{at}")
        assert await steps.pull(f"w{at}") == []
        found.append(steps)
    return found


async def numbers_taken(workers: list[Steps], count: int = 100) -> list[int]:
    """How many jobs a pull of each worker takes, one worker after the other."""
    return [len(await steps.pull(f"w{at}", count)) for at, steps in enumerate(workers)]


@pytest.mark.promise(
    "Access: jobs that arrive together divide evenly over the workers that pull, and a stopped "
    "worker delays none (by number, within 50 ms of their submit; the speed of a worker does not "
    "count)"
)
@pytest.mark.parametrize(
    ("num_workers", "num_jobs", "expected"),
    [
        (2, 1, [1, 0]),
        (2, 4, [2, 2]),
        (2, 5, [3, 2]),
        (3, 7, [3, 2, 2]),
        (3, 64, [22, 21, 21]),
        (1, 9, [9]),
    ],
)
async def test_jobs_that_wait_divide_evenly_over_the_workers_that_ask(
    transport: RedisTransport, num_workers: int, num_jobs: int, expected: list[int]
) -> None:
    workers = await workers_of(transport, num_workers)
    for _ in range(num_jobs):
        await workers[0].submit()
    assert await numbers_taken(workers) == expected
    assert await numbers_taken(workers) == [0] * num_workers


async def test_who_holds_fewer_jobs_gets_more(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 3)
    for _ in range(6):
        await workers[0].submit()
    assert await numbers_taken(workers, 100) == [2, 2, 2]
    held = await workers[2].queue.reconcile("w2", frozenset())
    for delivery in held:
        await workers[2].say("w2", Stream(delivery), [5], "a", end=FINISHED)
    await workers[0].submit()
    assert await numbers_taken(workers) == [0, 0, 1]
    for _ in range(4):
        await workers[0].submit()
    assert await numbers_taken(workers) == [1, 1, 2]


async def test_a_portion_is_taken_in_the_order_of_the_lanes(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 2)
    for lane in (3, 0, 7, 1):
        await workers[0].submit(lane=lane)
    taken = [delivery.job.lane for at in (0, 1) for delivery in await workers[at].pull(f"w{at}")]
    assert taken == [0, 1, 3, 7]


async def test_no_job_is_deferred_to_a_worker_that_takes_none(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 5)
    await workers[1].heartbeat("w1", draining=True)
    await workers[2].heartbeat("w2", stalled=True)
    await workers[3].die("w3")
    await workers[4].redis.hset(workers[4].keys.worker("w4"), "pull_ms", 1)
    for _ in range(4):
        await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 4


async def test_nothing_is_deferred_to_a_worker_of_another_model(transport: RedisTransport) -> None:
    (asking,) = await workers_of(transport, 1)
    other = other_process(transport, defer_ms=FAR_MS, asking_ms=FAR_MS)
    await other.worker("other", ["another"])
    assert await other.pull("other") == []
    for _ in range(4):
        await asking.submit()
    assert len(await asking.pull("w0")) == 4


async def test_a_worker_of_several_models_shares_the_ones_it_has_in_common(
    transport: RedisTransport,
) -> None:
    (asking,) = await workers_of(transport, 1)
    other = other_process(transport, defer_ms=FAR_MS, asking_ms=FAR_MS)
    await other.worker("other", ["another", MODEL])
    assert await other.pull("other") == []
    for _ in range(4):
        await asking.submit()
    assert len(await asking.pull("w0")) == 2
    assert len(await other.pull("other")) == 2


async def test_nothing_is_deferred_to_a_worker_that_has_no_place_left(
    transport: RedisTransport,
) -> None:
    """It holds fewer jobs, and they take all of its places."""
    workers = await workers_of(transport, 2)
    for _ in range(4):
        await workers[0].submit()
    assert await numbers_taken(workers[:1]) == [2]
    assert len(await workers[1].pull("w1", 1)) == 1
    assert len(await workers[0].pull("w0")) == 1


async def test_a_worker_that_only_oversubscribes_does_not_ask(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 2)
    await workers[1].redis.hset(workers[1].keys.worker("w1"), "pull_ms", 1)
    assert await workers[1].queue.oversubscribe("w1", 1, []) == []
    for _ in range(4):
        await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 4


async def test_a_deferred_job_is_taken_when_no_other_worker_takes_it(
    transport: RedisTransport,
) -> None:
    """The other worker has asked, lives, and stands still from then on."""
    workers = await workers_of(transport, 2, defer_ms=SHORT_MS)
    for _ in range(4):
        await workers[0].submit()
    taken: list[Delivery] = []
    while len(taken) < 4:
        got = await workers[0].queue.pull("w0", 100, LEASE_MS)
        assert got, "a job was held back for as long as the wait"
        taken += got


async def test_a_wait_for_the_end_of_a_deferral_is_ended_by_a_ping(
    transport: RedisTransport,
) -> None:
    """An idle server looks for ended waits ten times a second: a short one would end late."""
    workers = await workers_of(transport, 2, defer_ms=SHORT_MS)
    for _ in range(4):
        await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 2
    before = await calls_of(workers[0])
    assert len(await workers[0].queue.pull("w0", 100, LEASE_MS)) == 2
    after = await calls_of(workers[0])
    assert after["evalsha"] > before["evalsha"], "the server counts commands"
    if not transport.is_fake:
        assert after["ping"] > before.get("ping", 0)


async def test_when_one_job_has_waited_for_long_all_that_wait_may_be_taken(
    transport: RedisTransport,
) -> None:
    """Workers that do not keep up need no sharing, and lanes keep their order."""
    workers = await workers_of(transport, 2, defer_ms=SHORT_MS)
    old = await workers[0].submit(lane=7)
    begun_ms = int((await workers[0].hash(old.job_id))["sub_ms"])

    async def is_old() -> bool:
        seconds, microseconds = await workers[0].redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000 > begun_ms + SHORT_MS

    await until(is_old)
    for _ in range(3):
        await workers[0].submit()
    assert [delivery.job.lane for delivery in await workers[0].pull("w0")] == [0, 0, 0, 7]


async def test_jobs_that_come_while_two_workers_wait_divide_evenly(
    transport: RedisTransport,
) -> None:
    """Whichever the server wakes first, and without anything coming to its end by the clock."""
    workers = await workers_of(transport, 2)
    taken = Counter[str]()

    async def take(at: int) -> None:
        while sum(taken.values()) < 4:
            got = await workers[at].queue.pull(f"w{at}", 100, 100)
            taken[f"w{at}"] += len(got)

    async def submit() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(workers[0].submit())

    await asyncio.gather(take(0), take(1), submit())
    assert taken == {"w0": 2, "w1": 2}


async def test_after_the_servers_clock_was_set_back_nothing_is_deferred(
    transport: RedisTransport,
) -> None:
    """Entries are then from a time that has yet to come, and their age is not known."""
    workers = await workers_of(transport, 2, defer_ms=SHORT_MS)
    seconds, _ = await workers[0].redis.time()
    future = f"{(seconds + 3600) * 1000}-0"
    await workers[0].redis.xadd(workers[0].keys.queue(MODEL, 0), {"id": "0-nobody"}, id=future)
    for _ in range(4):
        await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 4


async def test_unreadable_worker_entries_do_not_stop_pulls(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await workers[0].redis.hset(workers[0].keys.workers, "strange", json.dumps("no list")[:-1])
    for _ in range(4):
        await workers[0].submit()
    assert await numbers_taken(workers) == [2, 2]
