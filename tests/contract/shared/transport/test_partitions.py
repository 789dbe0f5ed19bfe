"""Several partitions, by one transport: together they are one queue."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from penstock.launcher.redis_server import PrivateServer
from shared.keys import Keys, new_job_id, partition_of
from shared.messages import START, Delta, Finished, Idempotency, Job, JobState, Started
from shared.partitions import PartitionCount
from shared.transport.connect import RedisTransport, StorePolicy
from shared.transport.deliveries import DeliveryReader
from shared.transport.partitions.transport import PartitionedTransport, open_partitions
from shared.transport.partitions.turns import TAKE_PATIENCE_S
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from shared.transport.ports.batches import BatchClaim, BatchProgress
from shared.transport.ports.deployment import ProcessKind, Spent
from shared.transport.ports.job_search import JobFilter
from shared.transport.ports.jobs import RESYNC, TransportError
from shared.transport.ports.queue import AppendStatus, Delivery, WorkerReport
from shared.transport.ports.registry import Order, Ordered
from tests.contract.shared.transport.batch_steps import new_batch
from tests.support.jobs import MODEL, Stream, accepted, make_job
from tests.support.polling import until
from tests.support.redis_server import keys_of
from tests.support.transport_steps import FINISHED, LEASE_MS, WAIT_S

THREE = PartitionCount(3)


@contextlib.asynccontextmanager
async def opened(
    redis_url: str, namespace: str, count: PartitionCount = THREE
) -> AsyncIterator[PartitionedTransport]:
    transport = await open_partitions(redis_url, count, namespace=namespace)
    assert isinstance(transport, PartitionedTransport)
    try:
        yield transport
    finally:
        await transport.aclose()


@pytest.fixture
async def three(redis_url: str, namespace: str) -> AsyncIterator[PartitionedTransport]:
    async with opened(redis_url, namespace) as transport:
        await transport.queue.setup([MODEL])
        await beat(transport, "w1")
        yield transport


async def beat(
    transport: PartitionedTransport, worker_id: str, jobs: Sequence[Delivery] = (), **more: Any
) -> Any:
    running = [(delivery.job.job_id, delivery.attempt) for delivery in jobs]
    report = WorkerReport(worker_id, LEASE_MS, (MODEL,), {"step": 1}, running, **more)
    return await transport.queue.heartbeat(report)


async def submit(transport: PartitionedTransport, num: int, **members: Any) -> list[Job]:
    jobs = []
    for _ in range(num):
        job = make_job(new_job_id(transport.store.partition_for()), **members)
        await accepted(transport.store, job)
        jobs.append(job)
    return jobs


def partitions_of(ones: Sequence[Job | Delivery]) -> Counter[int]:
    ids = [one.job.job_id if isinstance(one, Delivery) else one.job_id for one in ones]
    return Counter(map(partition_of, ids))


async def say(
    transport: PartitionedTransport, streams: Sequence[Stream], token: int, end: Any = None
) -> list[str]:
    items = [stream.append([token], "x", end) for stream in streams]
    results = await transport.queue.append("w1", LEASE_MS, items)
    for stream, item in zip(streams, items, strict=True):
        stream.accept(item)
    return [result.status for result in results]


async def test_new_jobs_are_spread_and_each_one_keeps_its_keys_together(
    three: PartitionedTransport, redis_url: str, namespace: str
) -> None:
    jobs = await submit(three, 6)
    assert partitions_of(jobs) == {0: 2, 1: 2, 2: 2}
    client = redis.asyncio.Redis.from_url(redis_url)
    keys = await keys_of(client, namespace)
    await client.aclose()
    for job in jobs:
        prefix = Keys(namespace, partition_of(job.job_id)).prefix
        own = [key for key in keys if job.job_id in key]
        assert own
        assert all(key.startswith(prefix) for key in own)


async def test_a_job_is_heard_read_and_ended_in_any_partition(three: PartitionedTransport) -> None:
    jobs = await submit(three, 3)
    subscriptions = [await three.bus.subscribe(job.job_id) for job in jobs]
    deliveries = await three.queue.pull("w1", 8, 0)
    assert {delivery.job.job_id for delivery in deliveries} == {job.job_id for job in jobs}
    streams = [Stream(delivery) for delivery in deliveries]
    assert await say(three, streams, 5) == ["ok"] * 3
    assert await say(three, streams, 6, FINISHED) == ["ok"] * 3
    for job, subscription in zip(jobs, subscriptions, strict=True):
        heard = [await subscription.get(WAIT_S) for _ in range(5)]
        assert heard[0] is RESYNC
        assert [type(event) for event in heard[1:]] == [Started, Delta, Delta, Finished]
        assert len(await three.store.read_log(job.job_id, START)) == 3
        record = await three.store.get(job.job_id)
        assert record is not None
        assert record.state is JobState.FINISHED
        await three.bus.unsubscribe(subscription)
    assert (await three.registry.queue_stats()).totals["finished"] == 3


async def test_a_full_partition_leaves_places_to_the_others(three: PartitionedTransport) -> None:
    await submit(three, 12)
    taken = await three.queue.pull("w1", 6, 0)
    assert partitions_of(taken) == {0: 2, 1: 2, 2: 2}


async def test_one_place_goes_round_among_the_partitions(three: PartitionedTransport) -> None:
    await submit(three, 12)
    taken = [delivery for _ in range(6) for delivery in await three.queue.pull("w1", 1, 0)]
    assert partitions_of(taken) == {0: 2, 1: 2, 2: 2}


async def test_a_job_waits_for_at_most_two_of_the_others_for_each_before_it_in_its_partition(
    three: PartitionedTransport,
) -> None:
    """The bound of the error that lanes, tenants and ages have with several partitions."""
    rng = random.Random(4)
    jobs = []
    for _ in range(60):
        jobs.append(
            make_job(
                new_job_id(rng.choice((0, 0, 0, 1, 2))),
                lane=rng.choice((0, 3, 6)),
                tenant=rng.choice("ab"),
            )
        )
        await accepted(three.store, jobs[-1])
    claimed: list[int] = []
    while len(claimed) < len(jobs):
        (delivery,) = await three.queue.pull("w1", 1, 0)
        await say(three, [Stream(delivery)], 5, FINISHED)
        claimed.append(partition_of(delivery.job.job_id))
        assert len(claimed) <= 3 * claimed.count(claimed[-1])


async def test_jobs_that_come_at_once_never_get_more_places_than_are_free(
    three: PartitionedTransport,
) -> None:
    for _ in range(10):
        waiting = asyncio.create_task(three.queue.pull("w1", 1, 5000))
        await asyncio.sleep(0.05)
        jobs = [make_job(new_job_id(number)) for number in range(3)]
        await asyncio.gather(*(accepted(three.store, job) for job in jobs))
        taken = list(await waiting)
        assert len(taken) == 1
        assert (await three.registry.queue_stats()).queued == 2
        while len(taken) < 3:
            more = await three.queue.pull("w1", 1, 2000)
            assert len(more) == 1
            taken += more
        await say(three, [Stream(delivery) for delivery in taken], 5, FINISHED)


@pytest.mark.parametrize("number", range(3))
async def test_a_waiting_pull_is_woken_by_a_job_in_any_partition(
    three: PartitionedTransport, number: int
) -> None:
    waiting = asyncio.create_task(three.queue.pull("w1", 4, 10_000))
    await asyncio.sleep(0.1)
    job = make_job(new_job_id(number))
    await accepted(three.store, job)
    (delivery,) = await asyncio.wait_for(waiting, 0.9)  # less than one wait in the server
    assert delivery.job == job


async def test_a_job_of_a_higher_lane_overtakes_from_any_partition(
    three: PartitionedTransport,
) -> None:
    await submit(three, 3, lane=6)
    waiting = asyncio.create_task(three.queue.overtake("w1", 1, 6, 10_000))
    await asyncio.sleep(0.1)
    job = make_job(new_job_id(2), lane=0)
    await accepted(three.store, job)
    assert [delivery.job for delivery in await asyncio.wait_for(waiting, 0.9)] == [job]


async def test_a_dead_workers_jobs_are_recovered_from_all_partitions(
    three: PartitionedTransport,
) -> None:
    await submit(three, 6)
    taken = await three.queue.pull("w1", 6, 0)
    await say(three, [Stream(delivery) for delivery in taken], 5)
    await three.queue.declare_dead("w1")
    await beat(three, "w2")
    recovered = await three.queue.recover("w2", 4)
    assert len(recovered) == 4
    await asyncio.sleep(0.15)
    recovered = [*recovered, *await three.queue.recover("w2", 4)]
    assert {d.job.job_id for d in recovered} == {d.job.job_id for d in taken}
    assert {(d.attempt, d.output_token_ids) for d in recovered} == {(2, (5,))}


async def test_a_partition_whose_logs_take_long_to_read_still_gives_its_jobs(
    three: PartitionedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = await submit(three, 1)
    taken = await three.queue.pull("w1", 1, 0)
    await say(three, [Stream(delivery) for delivery in taken], 5)
    one = three.partitions.of(job.job_id)
    read = DeliveryReader.deliveries

    async def slow(self: DeliveryReader, worker_id: str, claims: Any) -> list[Delivery]:
        if claims:
            await asyncio.sleep(TAKE_PATIENCE_S + 0.2)
        return await read(self, worker_id, claims)

    monkeypatch.setattr(DeliveryReader, "deliveries", slow)
    await three.queue.declare_dead("w1")
    await beat(three, "w2")
    (recovered,) = await three.queue.recover("w2", 1)
    await beat(three, "w2")
    (lost,) = await three.queue.reconcile("w2", frozenset())
    assert lost.output_token_ids == recovered.output_token_ids == (5,)
    assert not one.is_away


async def test_a_heartbeat_returns_what_every_partition_lets_go(
    three: PartitionedTransport,
) -> None:
    jobs = await submit(three, 3)
    taken = await three.queue.pull("w1", 3, 0)
    await three.store.cancel(jobs[0].job_id, "cancelled")
    await three.store.cancel(jobs[2].job_id, "cancelled")
    reply = await beat(three, "w1", taken)
    assert set(reply.dropped) == {jobs[0].job_id, jobs[2].job_id}
    assert not reply.unheard
    await beat(three, "w1", (), spent=[Spent("t", 7)])
    assert (await three.registry.queue_stats()).cpu_us_by_tenant == {"t": 7}


async def test_hints_to_cancel_come_from_every_partition(three: PartitionedTransport) -> None:
    jobs = await submit(three, 3)
    await three.queue.pull("w1", 3, 0)
    hints = three.queue.cancellations("w1")
    first = asyncio.create_task(anext(hints))
    for one in three.partitions.all:
        control = one.transport.keys.control("w1")

        async def listens(one: Any = one, control: str = control) -> bool:
            found = await one.transport.connections.commands.pubsub_numsub(control)
            return bool(found[0][1])

        await until(listens)
    for job in jobs:
        await three.store.cancel(job.job_id, "cancelled")
    heard = {await asyncio.wait_for(first, WAIT_S)}
    heard |= {await asyncio.wait_for(anext(hints), WAIT_S) for _ in range(2)}
    assert heard == {job.job_id for job in jobs}
    await hints.aclose()  # type: ignore[attr-defined]


async def test_each_partition_has_its_part_of_a_limit(three: PartitionedTransport) -> None:
    limits = AdmissionLimits(max_queued_jobs=4, requests_per_minute=30)
    jobs = [make_job(new_job_id(n), tenant="t") for n in (0, 0, 1, 1, 2, 2)]  # two in each
    for job in jobs:
        submission = await three.store.submit(job, limits, "")
    assert [(one.name, one.per_minute, one.remaining) for one in submission.allowances] == [
        ("requests", 30, 24)
    ]
    with pytest.raises(QueueFull) as refused:
        await three.store.submit(make_job(new_job_id(1)), limits, "")
    assert refused.value.scope == "total"


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("max_queued_jobs", "total"),
        ("max_queued_jobs_per_tenant", "tenant"),
        ("max_jobs_per_tenant", "tenant"),
        ("requests_per_minute", "tenant"),
    ],
)
@pytest.mark.parametrize("limit", [1, 4, 6])
async def test_all_partitions_exceed_a_limit_by_less_than_a_job_each(
    three: PartitionedTransport, name: str, scope: str, limit: int
) -> None:
    limits = AdmissionLimits(**{name: limit})
    num_accepted = {"in turn": 0, "by key": 0}

    async def submit_to(number: int, tenant: str) -> bool:
        try:
            await three.store.submit(make_job(new_job_id(number), tenant=tenant), limits, "")
        except QueueFull:
            return False
        num_accepted[tenant] += 1
        return True

    taken = [await submit_to(n % 3, "in turn") for n in range(20)]
    assert taken.index(False) >= limit, "no job that goes round is refused too early"
    assert limit <= num_accepted["in turn"] <= limit + 2
    if scope == "tenant":
        rng = random.Random(limit)
        for _ in range(40):
            await submit_to(rng.randrange(3), "by key")
        assert limit <= num_accepted["by key"] <= limit + 2


@pytest.mark.parametrize("name", ["max_queued_tokens", "max_queued_tokens_per_tenant"])
async def test_a_partition_holds_its_part_of_the_queued_tokens_or_one_longer_prompt(
    three: PartitionedTransport, name: str
) -> None:
    limits = AdmissionLimits(**{name: 20})  # seven in each

    async def is_accepted(number: int, num_tokens: int) -> bool:
        try:
            job = make_job(new_job_id(number), prompt=range(num_tokens), tenant="t")
            await three.store.submit(job, limits, "")
        except QueueFull:
            return False
        return True

    assert [await is_accepted(0, n) for n in (3, 4, 1)] == [True, True, False]
    assert [await is_accepted(1, n) for n in (21, 20, 1)] == [False, True, False]
    assert [await is_accepted(2, n) for n in (1, 20, 6)] == [True, False, True]


async def test_lists_are_merged_and_continue_where_a_page_ends(three: PartitionedTransport) -> None:
    jobs = await submit(three, 9)
    for delivery in await three.queue.pull("w1", 4, 0):
        await say(three, [Stream(delivery)], 5, FINISHED)
        await asyncio.sleep(0.002)
    whole = (await three.search.find(JobFilter(), 100)).records
    assert {record.job_id for record in whole} == {job.job_id for job in jobs}
    places = [(r.ended_ms is None, r.ended_ms or r.deadline_ms, r.job_id) for r in whole]
    assert places == sorted(places, reverse=True)
    pages, after = [], None
    while True:
        page = await three.search.find(JobFilter(), 2, after)
        pages += page.records
        after = page.after
        if after is None:
            break
    assert [record.job_id for record in pages] == [record.job_id for record in whole]
    (found,) = (await three.search.find(JobFilter(id_part=jobs[5].job_id), 5)).records
    assert found.job_id == jobs[5].job_id


async def test_a_key_finds_its_job_after_the_number_of_partitions_has_changed(
    redis_url: str, namespace: str
) -> None:
    key = Idempotency(key="k" * 64, body="b" * 64)
    async with opened(redis_url, namespace, PartitionCount(1, 2)) as before:
        job = make_job(new_job_id(before.store.partition_for(key.key)), idempotency=key)
        await accepted(before.store, job)
    async with opened(redis_url, namespace) as after:
        kept = await after.store.kept_key(key.key)
        assert kept is not None
        assert kept.job_id == job.job_id


async def test_a_row_of_a_batch_keeps_its_partition_after_their_number_has_changed(
    redis_url: str, namespace: str
) -> None:
    rows = [str(number) for number in range(1, 31)]
    async with opened(redis_url, namespace, PartitionCount(2)) as before:
        batch = await new_batch(before)
        assert batch.num_partitions == 2
        kept = [before.store.partition_for(row) for row in rows]
    for count in (PartitionCount(3), PartitionCount(1, 2)):
        async with opened(redis_url, namespace, count) as after:
            found = await after.batches.get(batch.batch_id)
            assert found is not None
            assert kept == [after.store.partition_for(row, found.num_partitions) for row in rows]
            assert kept != [after.store.partition_for(row) for row in rows]
    async with opened(redis_url, namespace, PartitionCount(2)) as fewer:
        assert {fewer.store.partition_for(row, 3) for row in rows} == {0, 1}


async def test_drained_partitions_get_no_new_jobs_and_their_old_ones_are_served(
    three: PartitionedTransport, redis_url: str, namespace: str
) -> None:
    jobs = await submit(three, 3)
    await three.check()
    async with opened(redis_url, namespace, PartitionCount(1, 2)) as shrunk:
        assert partitions_of(await submit(shrunk, 3)) == {0: 3}
        await shrunk.queue.setup([MODEL])
        taken = await shrunk.queue.pull("w1", 8, 0)
        assert {job.job_id for job in jobs} <= {delivery.job.job_id for delivery in taken}
    alone = await open_partitions(redis_url, PartitionCount(1), namespace=namespace)
    (warning,) = [one for one in await alone.check() if "PENSTOCK_PARTITIONS" in one]
    assert "[1, 2]" in warning
    await alone.aclose()


async def test_an_order_reaches_every_partition(three: PartitionedTransport) -> None:
    assert await three.registry.order("w1", Order.DRAIN) is Ordered.OK
    assert (await beat(three, "w1")).order is Order.DRAIN
    await submit(three, 3)
    assert not await three.queue.pull("w1", 3, 0)
    assert [worker.worker_id for worker in await three.registry.workers()] == ["w1"]
    assert await three.registry.order("w1", Order.SERVE) is Ordered.OK
    await beat(three, "w1")
    assert len(await three.queue.pull("w1", 3, 0)) == 3


async def test_a_paused_queue_is_paused_in_every_partition(three: PartitionedTransport) -> None:
    await three.queue.announce(MODEL, b"{}", {"digest": b"blob"})
    assert (await three.registry.models())[MODEL].card == b"{}"
    assert await three.registry.get_blob("digest") == b"blob"
    assert await three.registry.pause(MODEL, "me") is True
    await submit(three, 3)
    assert not await three.queue.pull("w1", 3, 0)
    assert await three.registry.resume(MODEL)
    assert len(await three.queue.pull("w1", 3, 0)) == 3


async def test_a_dead_letter_is_replaced_in_its_own_partition(three: PartitionedTransport) -> None:
    (job,) = await submit(three, 1)
    for number in range(4):
        worker = f"w{number + 2}"
        await beat(three, worker)
        (delivery,) = await three.queue.recover(worker, 1) or await three.queue.pull(worker, 1, 0)
        assert delivery.job == job
        await three.queue.declare_dead(worker)
        await asyncio.sleep(0.15)
    await beat(three, "last")
    assert not await three.queue.recover("last", 1)
    (letter,) = await three.dead_letters.list(None, 10)
    assert letter.job_id == job.job_id
    again = await three.dead_letters.request(job.job_id)
    assert again is not None
    elsewhere = replace(again, job_id=new_job_id((partition_of(job.job_id) + 1) % 3))
    with pytest.raises(ValueError, match="its own partition"):
        await three.store.requeue(job.job_id, elsewhere, AdmissionLimits())
    again = replace(again, job_id=new_job_id(partition_of(job.job_id)))
    assert await three.store.requeue(job.job_id, again, AdmissionLimits()) == again.job_id


async def test_saved_rows_of_a_batch_expire_soon_in_every_partition(
    three: PartitionedTransport,
) -> None:
    batch = await new_batch(three)
    claim = await three.batches.claim("f1", 10_000, [])
    assert isinstance(claim, BatchClaim)
    jobs = await submit(three, 3)
    streams = [Stream(delivery) for delivery in await three.queue.pull("w1", 3, 0)]
    await say(three, streams, 5, FINISHED)
    ids = [job.job_id for job in jobs]
    await three.batches.save(claim, 10_000, BatchProgress(), job_ids=ids)
    for job_id in ids:
        record = await three.store.get(job_id)
        assert record is not None
        assert record.until_ms is not None
        assert record.ended_ms is not None
        assert record.until_ms - record.ended_ms <= 61_000
    assert batch.batch_id == claim.batch_id


class Apart:
    """Two partitions, each on a server of its own; the second can be killed."""

    def __init__(self, redis_url: str, namespace: str, server: PrivateServer) -> None:
        self.server = server
        urls = [redis_url, server.start()]
        transports = [
            RedisTransport(url, Keys(namespace, number), StorePolicy(), share=0.5)
            for number, url in enumerate(urls)
        ]
        self.transport = PartitionedTransport(transports, 2)


@pytest.fixture
async def apart(redis_url: str, namespace: str, tmp_path: Any) -> AsyncIterator[Apart]:
    made = Apart(redis_url, namespace, PrivateServer(tmp_path))
    await made.transport.queue.setup([MODEL])
    await beat(made.transport, "w1")
    yield made
    await made.transport.aclose()
    made.server.stop()


async def test_a_partition_that_is_away_keeps_its_jobs_and_no_others(apart: Apart) -> None:
    both = apart.transport
    await submit(both, 2)
    taken = await both.queue.pull("w1", 2, 0)
    streams = {partition_of(delivery.job.job_id): Stream(delivery) for delivery in taken}
    waiting = make_job(new_job_id(1))
    await accepted(both.store, waiting)
    await both.store.frontend_heartbeat("f1", 10_000)
    apart.server.stop()
    with pytest.raises(TransportError):
        await say(both, [streams[1]], 5)
    assert both.queue.is_away(streams[1].job_id)
    assert not both.queue.is_away(streams[0].job_id)
    reply = await beat(both, "w1", taken)
    assert reply.unheard == [streams[1].job_id]
    assert not reply.lost
    assert partitions_of(await submit(both, 4)) == {0: 4}  # new ones are for those that answer
    assert len(await both.queue.pull("w1", 8, 0)) == 4
    assert await say(both, [streams[0]], 5) == [AppendStatus.OK]
    await both.store.frontend_heartbeat("f1", 10_000)
    await both.store.reap()
    assert [worker.worker_id for worker in await both.registry.workers()] == ["w1"]
    assert (await both.registry.queue_stats()).running == 5
    assert await both.deployment.reports(ProcessKind.FRONTEND, 10) == []
    with pytest.raises(TransportError):
        await both.registry.order("w1", Order.DRAIN)

    apart.server.start()
    lease = both.partitions.all[1].transport.keys.frontend("f1")
    await both.partitions.all[1].transport.connections.commands.delete(lease)
    in_time = []

    async def is_back() -> bool:
        in_time.append(await both.store.frontend_heartbeat("f1", 10_000))
        return not both.partitions.all[1].is_away

    await until(is_back)
    in_time += [await both.store.frontend_heartbeat("f1", 10_000) for _ in range(2)]
    assert in_time.count(False) == 1  # its lease had ended there
    assert in_time[-1]
    streams[1] = Stream(next(d for d in taken if d.job.job_id == streams[1].job_id))
    assert await say(both, [streams[1]], 5) == [AppendStatus.OK]
    assert [delivery.job for delivery in await both.queue.pull("w1", 8, 0)] == [waiting]


async def test_offers_reach_a_partition_that_is_back_without_a_heartbeat(apart: Apart) -> None:
    """A worker that loads a model sends none."""
    both = apart.transport
    away = both.partitions.all[1]
    apart.server.stop()

    async def offer() -> bool:
        await both.offers.offer("w2", [MODEL], life_ms=5000, bound_ms=0, swap_ms=0)
        return not away.is_away

    await until(lambda: _negated(offer()))
    apart.server.start()
    await until(offer)
    await offer()
    stored = await away.transport.connections.commands.hkeys(away.transport.keys.offers)
    assert stored == [b"w2"]


async def _negated(answer: Awaitable[bool]) -> bool:
    return not await answer


async def test_the_figures_of_a_partition_that_is_away_are_its_last(apart: Apart) -> None:
    both = apart.transport
    for number in (0, 1, 1):
        await accepted(both.store, make_job(new_job_id(number)))
    await both.store.reap()  # samples the servers
    before = await both.registry.queue_stats()
    assert {n: one.queued for n, one in before.partitions.items()} == {0: 1, 1: 2}
    assert all(one.store_commands > 0 for one in before.partitions.values())
    assert (before.queued, before.away) == (3, frozenset())
    apart.server.stop()
    await accepted(both.store, make_job(new_job_id(0)))
    await both.registry.queue_stats()
    after = await both.registry.queue_stats()
    assert {n: one.queued for n, one in after.partitions.items()} == {0: 2, 1: 2}
    assert (after.queued, after.away) == (4, {1})
    assert all(after.totals[state] >= total for state, total in before.totals.items())


async def test_a_full_partition_that_is_away_does_not_make_the_others_full(apart: Apart) -> None:
    both = apart.transport
    for one in both.partitions.all:
        await both.store.reap()
        await one.transport.registry.queue_stats()
    stats = await both.registry.queue_stats()
    full = replace(stats.partitions[1], store_used=2, store_limit=1)
    both.registry._stats[1] = full  # type: ignore[attr-defined]
    apart.server.stop()
    both.partitions.all[1].left("a test")
    after = await both.registry.queue_stats()
    assert after.away == {1}
    assert (after.store_used, after.store_limit) != (2, 1)
    assert after.partitions[1] == full


async def test_without_any_partition_every_call_fails_until_one_is_back(apart: Apart) -> None:
    both = apart.transport
    for one in both.partitions.all:
        one.left("a test")
    with pytest.raises(TransportError):
        await both.queue.pull("w1", 1, 0)
    await beat(both, "w1")
    assert await both.queue.pull("w1", 1, 0) == []


async def test_a_partition_that_was_away_at_the_setup_gives_its_jobs_once_it_is_back(
    apart: Apart,
) -> None:
    both = apart.transport
    away = both.partitions.all[1]
    apart.server.stop()
    both.new_queue()
    with pytest.raises(TransportError):
        await away.call(away.transport.store.ping())
    await both.queue.setup([MODEL])
    await beat(both, "w1")
    apart.server.start()
    await away.transport.connections.commands.flushall()

    async def is_back() -> bool:
        await beat(both, "w1")
        return not away.is_away

    await until(is_back)
    job = make_job(new_job_id(1))
    await accepted(both.store, job)
    assert [delivery.job for delivery in await both.queue.pull("w1", 1, 2000)] == [job]


async def test_a_worker_leaves_a_model_only_in_every_partition(apart: Apart) -> None:
    both = apart.transport
    job = make_job(new_job_id(1))
    await accepted(both.store, job)
    (taken,) = await both.queue.pull("w1", 1, 0)
    apart.server.stop()
    for _ in range(2):
        with pytest.raises(TransportError):
            await both.queue.retire("w1", returns=True)
    apart.server.start()

    async def has_left() -> bool:
        await beat(both, "w1", [taken])
        with contextlib.suppress(TransportError):
            await both.queue.retire("w1", returns=True)
            return True
        return False

    await until(has_left)
    await beat(both, "w2")
    assert [delivery.job for delivery in await both.queue.recover("w2", 1)] == [job]
