"""What is kept for people to look at: the last hour, frontends, the loads of tenants."""

from __future__ import annotations

import pytest

from api.deployment.history import folded
from shared.keys import new_job_id
from shared.transport.connect import RedisTransport
from shared.transport.ports.deployment import (
    DAY_SLOT_S,
    HISTORY_SLOTS,
    REPORT_LIFE_MS,
    TTFT_PER_OCTAVE,
    HistorySlot,
    ProcessKind,
    Sample,
    Spent,
    TenantLoad,
)
from shared.transport.ports.queue import HeartbeatReply, WorkerReport
from tests.support.jobs import Stream
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps


async def told(transport: RedisTransport) -> HistorySlot:
    """The latest slots, as if they were one: a test may run from one into the next."""
    *_, before, last = (await transport.deployment.history(HISTORY_SLOTS)).slots
    ttft = {b: before.ttft.get(b, 0) + last.ttft.get(b, 0) for b in {*before.ttft, *last.ttft}}
    return HistorySlot(
        last.number,
        max(before.queued or 0, last.queued or 0),
        max(before.running or 0, last.running or 0),
        before.accepted if last.accepted is None else last.accepted,
        before.ended if last.ended is None else last.ended,
        ttft,
        failed=before.failed if last.failed is None else last.failed,
        tokens_in=(before.tokens_in or 0) + (last.tokens_in or 0),
        tokens_out=(before.tokens_out or 0) + (last.tokens_out or 0),
        unavailable=(before.unavailable or 0) + (last.unavailable or 0),
        kv_permille=max(before.kv_permille or 0, last.kv_permille or 0),
    )


@pytest.mark.promise(
    "Dashboard: every frontend shows the same hour: queue depth, requests per second, quantiles of "
    "the time to the first token"
)
async def test_every_reap_notes_the_queue(steps: Steps) -> None:
    await steps.store.reap()
    slot = await told(steps.transport)
    assert (slot.queued, slot.running, slot.accepted, slot.ended) == (0, 0, 0, 0)
    delivery = await steps.running("w1")
    for _ in range(3):
        await steps.submit()
    await steps.store.reap()
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    await steps.pull("w1", 3)
    await steps.store.reap()
    slot = await told(steps.transport)
    assert (slot.queued, slot.running) == (3, 3), "the most that there were"
    assert (slot.accepted, slot.ended) == (4, 1)
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


@pytest.mark.parametrize("ttft_ms", [0, 64, 1000, 3_600_000])
async def test_a_first_token_counts_once_by_how_long_it_took(steps: Steps, ttft_ms: int) -> None:
    stream = Stream(await steps.running("w1"))
    begin_ms = int((await steps.hash(stream.job_id))["sub_ms"]) - ttft_ms
    await steps.redis.hset(steps.keys.job(stream.job_id), "sub_ms", begin_ms)
    await steps.say("w1", stream, [5], "a")
    await steps.say("w1", stream, [6], "b", end=FINISHED)
    ((bucket, jobs),) = (await told(steps.transport)).ttft.items()
    took_ms = max(1, int((await steps.hash(stream.job_id))["first_ms"]) - begin_ms)
    assert jobs == 1
    assert took_ms >= ttft_ms
    assert 2 ** (bucket / TTFT_PER_OCTAVE) <= took_ms * 1.0001
    assert took_ms < 2 ** ((bucket + 1) / TTFT_PER_OCTAVE) * 1.0001


async def test_rows_of_batches_do_not_count(steps: Steps) -> None:
    """They wait behind all others, and nobody waits for their first token."""
    row = Stream(await steps.running("w1", job_id=f"{new_job_id()}_7"))
    await steps.say("w1", row, [5], "a")
    assert (await told(steps.transport)).ttft == {}


async def test_a_slot_of_which_nothing_is_known_is_empty(transport: RedisTransport) -> None:
    history = await transport.deployment.history(3)
    assert [slot.queued for slot in history.slots] == [None, None, None]
    numbers = [slot.number for slot in history.slots]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    assert numbers[-1] * 30 <= history.now_s < (numbers[-1] + 1) * 30


async def test_every_token_is_counted_once(steps: Steps) -> None:
    one, row = Stream(await steps.running("w1")), Stream(await steps.running("w1"))
    for stream in (one, row):
        await steps.say("w1", stream, [5], "a")
    await steps.say("w1", one, [6, 7], "bc", end=FINISHED)
    slot = await told(steps.transport)
    prompts = [int((await steps.hash(s.job_id))["prompt_tokens"]) for s in (one, row)]
    assert (slot.tokens_in, slot.tokens_out) == (sum(prompts), 4)


async def test_what_frontends_see_is_added_up_and_of_figures_the_most_is_kept(
    transport: RedisTransport,
) -> None:
    report, frontend = transport.deployment.report, ProcessKind.FRONTEND
    await report(frontend, "a", {}, sample=Sample({"unavailable": 2}, {"kv": 300}))
    await report(frontend, "b", {"port": 2}, sample=Sample({"unavailable": 1}, {"kv": 200}))
    slot = await told(transport)
    assert (slot.unavailable, slot.kv_permille) == (3, 300)
    (one, two) = await transport.deployment.reports(frontend, 10)
    assert (dict(one.stats), dict(two.stats)) == ({}, {"port": "2"})
    await assert_every_key_expires(transport.connections.commands, transport.keys.namespace)


async def test_ten_minutes_that_are_over_become_a_slot_of_the_day(steps: Steps) -> None:
    """As the dashboard folds those that are not over; what is folded stays."""
    (now,) = (await steps.transport.deployment.history(1)).slots
    over = now.number // 20 - 1
    parts = {
        20 * over + 3: {"queued": 4, "accepted": 10, "failed": 1, "t8": 2, "out": 7, "kv": 100},
        20 * over + 9: {"queued": 2, "accepted": 30, "failed": 3, "t8": 1, "t80": 5, "out": 5},
        20 * over - 20 * 5: {"queued": 1, "accepted": 5},  # while no process ran
    }
    for number, fields in parts.items():
        await steps.redis.hset(steps.keys.history(number), mapping=fields)
    read = (await steps.transport.deployment.history(HISTORY_SLOTS)).slots
    await steps.store.reap()
    day = {s.number: s for s in (await steps.transport.deployment.history(8, DAY_SLOT_S)).slots}
    expected = folded(over, [slot for slot in read if slot.number // 20 == over])
    assert (expected.queued, expected.accepted, expected.tokens_out) == (4, 30, 12)
    assert day[over] == expected
    assert day[over - 5].accepted == 5
    assert day[over - 1].accepted is None
    life_ms = await steps.redis.pttl(steps.keys.history_of_day(over))
    assert 24 * 3_600_000 < life_ms <= 25 * 3_600_000


@pytest.mark.parametrize("kind", ProcessKind)
async def test_a_process_is_listed_while_it_reports(
    transport: RedisTransport, kind: ProcessKind
) -> None:
    steps, deployment = Steps(transport), transport.deployment
    await deployment.report(kind, "b", {"host": "one", "port": 8000})
    await deployment.report(kind, "a", {"host": "two", "port": 8001})
    found = await deployment.reports(kind, 10)
    assert [report.process_id for report in found] == ["a", "b"]
    assert dict(found[0].stats) == {"host": "two", "port": "8001"}
    assert 0 <= found[0].age_s < REPORT_LIFE_MS / 1000
    assert len(await deployment.reports(kind, 1)) == 1
    (other,) = set(ProcessKind) - {kind}
    assert await deployment.reports(other, 10) == []
    await assert_every_key_expires(steps.redis, steps.keys.namespace)
    # Its report ends; the next report of another one takes it out of the index too.
    await steps.redis.delete(steps.keys.report(kind, "a"))
    await steps.redis.zadd(steps.keys.reports(kind), {"a": 1})
    assert [report.process_id for report in await deployment.reports(kind, 10)] == ["b"]
    await deployment.report(kind, "b", {"host": "one"})
    assert await steps.redis.zrange(steps.keys.reports(kind), 0, -1) == [b"b"]


async def test_a_tenants_load_is_what_it_has_queued_and_running(steps: Steps) -> None:
    await steps.running("w1", tenant="acme")
    for _ in range(2):
        await steps.submit(tenant="acme")
    loads = await steps.transport.deployment.tenants(["acme", "other"])
    assert loads == [TenantLoad("acme", 2, 1, 6), TenantLoad("other")]


async def test_what_frontends_and_workers_report_of_a_tenant_is_one_account(
    transport: RedisTransport,
) -> None:
    steps, report = Steps(transport), transport.deployment.report
    frontend = ProcessKind.FRONTEND
    await report(frontend, "a", {"port": 1}, [Spent("acme", 5_000, 2), Spent("bolt", 9_000)])
    await report(frontend, "b", {"port": 2}, [Spent("acme", 1_000, 1)])
    running = await steps.running("w1")
    beat = WorkerReport(
        "w1",
        LEASE_MS,
        (running.job.model,),
        {"step": 1},
        [(running.job.job_id, running.attempt)],
        spent=[Spent("acme", 4_000)],
    )
    assert await steps.queue.heartbeat(beat) == HeartbeatReply([], [], [])
    stats = await transport.registry.queue_stats()
    assert list(stats.cpu_us_by_tenant.items()) == [("acme", 10_000), ("bolt", 9_000)]
    assert stats.refused_by_tenant == {"acme": 3}
    (one, two) = await transport.deployment.reports(frontend, 10)
    assert (dict(one.stats), dict(two.stats)) == ({"port": "1"}, {"port": "2"})
    assert (await steps.redis.hget(f"{steps.keys.prefix}w:w1", "step")) == b"1"
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_accounts_begin_again_where_there_are_too_many(steps: Steps) -> None:
    await steps.redis.hset(steps.keys.cpu, mapping={f"t{i}": 1 for i in range(10_000)})
    await steps.transport.deployment.report(
        ProcessKind.FRONTEND, "a", {"port": 1}, [Spent("t1", 5)]
    )
    assert await steps.redis.hlen(steps.keys.cpu) == 10_000
    await steps.transport.deployment.report(
        ProcessKind.FRONTEND, "a", {"port": 1}, [Spent("new", 5)]
    )
    assert await steps.redis.hgetall(steps.keys.cpu) == {b"new": b"5"}
