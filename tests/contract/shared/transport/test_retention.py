"""Ended jobs are kept for their time; where Redis is nearly full, the oldest texts go first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.messages import START, Failed, OnDisconnect
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.job_store import StorePolicy
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from shared.transport.ports.job_search import JobFilter
from tests.contract.shared.transport.test_held import (
    MEGABYTE,
    SHARED,
    counted,
    held,
    pass_time,
    set_memory,
)
from tests.support.jobs import Stream
from tests.support.polling import until
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps

HOUR_MS = 3_600_000
GONE_MS = 1  # expired by Redis itself by the time that anybody looks

Opened = Callable[..., Awaitable[Steps]]


@pytest.fixture
async def frontend(redis_url: str, namespace: str) -> AsyncIterator[Opened]:
    """Opens the transports of frontends with settings of their own, over one server."""
    async with AsyncExitStack() as stack:

        async def opened(**policy: int) -> Steps:
            transport: RedisTransport = await open_transport(
                redis_url, namespace=namespace, policy=StorePolicy(**policy)
            )
            stack.push_async_callback(transport.aclose)
            return Steps(transport)

        yield opened


async def ended(steps: Steps, text: str = "a", **job: Any) -> str:
    """A job that finished; its id."""
    made = await steps.submit(**job)
    await steps.worker("w1")
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5], text, end=FINISHED)
    return made.job_id


async def lives(steps: Steps, job_id: str) -> tuple[int, int, int]:
    """How long its record, its log and its prompt are kept."""
    keys = (steps.keys.job(job_id), steps.keys.log(job_id), steps.keys.prompt(job_id))
    record, log, prompt = [await steps.redis.pttl(key) for key in keys]
    return record, log, prompt


def near(found: tuple[int, ...], *wanted: int) -> bool:
    return all(0.99 * want < life <= want for life, want in zip(found, wanted, strict=True))


async def grow_old(steps: Steps, ms: int = 2 * HOUR_MS) -> None:
    """The times come by which texts and records may go."""
    for kind in ("texts", "records"):
        for key in await steps.redis.keys(f"{steps.keys.prefix}{kind}*"):
            for member, score in await steps.redis.zrange(key, 0, -1, withscores=True):
                await steps.redis.zadd(key, {member: score - ms})


async def texts(steps: Steps, *job_ids: str) -> list[bool]:
    return [bool(await steps.redis.exists(steps.keys.log(job_id))) for job_id in job_ids]


async def records(steps: Steps, *job_ids: str) -> list[bool]:
    return [await steps.store.get(job_id) is not None for job_id in job_ids]


async def have_gone(found: Awaitable[list[bool]]) -> bool:
    return not any(await found)


async def end_for_reader(steps: Steps, job_id: str) -> Failed:
    (end,) = await steps.store.read_log(job_id, START)
    assert isinstance(end, Failed)
    return end


@pytest.mark.promise(
    "Streaming: an ended job and its text are kept as long as the settings or its request ask, and "
    "expiry is a 410 `job_expired` with its time"
)
async def test_record_and_text_are_kept_for_exactly_their_settings(frontend: Opened) -> None:
    steps = await frontend(record_ms=50 * HOUR_MS, text_ms=2 * HOUR_MS)
    job_id = await ended(steps)
    assert near(await lives(steps, job_id), 50 * HOUR_MS, 2 * HOUR_MS, 2 * HOUR_MS)
    record = await steps.store.get(job_id)
    assert record is not None
    assert record.until_ms is not None
    assert record.text_until_ms is not None
    assert record.until_ms - record.text_until_ms == 48 * HOUR_MS
    assert record.extra == {}
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_a_frontend_with_other_settings_keeps_its_own_jobs_by_them(frontend: Opened) -> None:
    """Whoever ends a job, it is the frontend that took it whose settings hold."""
    long, short = await frontend(record_ms=9 * HOUR_MS, text_ms=9 * HOUR_MS), await frontend()
    for steps, other, wanted in ((long, short, 9 * HOUR_MS), (short, long, HOUR_MS)):
        job = await steps.submit()
        await other.store.cancel(job.job_id, "cancelled")
        assert near((await lives(steps, job.job_id))[:2], wanted, wanted)
    assert (
        len((await short.search.find(JobFilter(), 10)).records) == 2
    )  # the shorter one drops nobody's


async def test_a_request_may_have_its_text_kept_shorter_and_its_job_longer(
    frontend: Opened,
) -> None:
    steps = await frontend(record_ms=2 * HOUR_MS, text_ms=2 * HOUR_MS)
    brief = await ended(steps, text_ms=60_000)
    assert near(await lives(steps, brief), 2 * HOUR_MS, 60_000, 60_000)
    long = await ended(steps, retain_ms=20 * HOUR_MS)
    assert near(await lives(steps, long), *[20 * HOUR_MS] * 3)


async def test_an_expired_text_is_told_with_its_time_and_its_setting(frontend: Opened) -> None:
    steps = await frontend(text_ms=GONE_MS)
    job_id = await ended(steps)
    await until(lambda: have_gone(texts(steps, job_id)))
    end = await end_for_reader(steps, job_id)
    assert end.code == "job_expired"
    assert "expired at 20" in end.message
    assert "PENSTOCK_TEXT_RETENTION_S" in end.message
    own = await ended(steps, text_ms=GONE_MS)
    await until(lambda: have_gone(texts(steps, own)))
    assert "expires_after" in (await end_for_reader(steps, own)).message


async def test_a_text_that_is_gone_before_its_time_is_lost(frontend: Opened) -> None:
    steps = await frontend()
    job_id = await ended(steps)
    await steps.redis.delete(steps.keys.log(job_id))
    assert (await end_for_reader(steps, job_id)).code == "job_lost"


async def test_a_job_of_an_older_release_is_kept_and_told_without_the_new_fields(
    frontend: Opened,
) -> None:
    steps = await frontend()
    job = await steps.submit()
    await steps.redis.hdel(steps.keys.job(job.job_id), "record_ms", "text_ms")
    await steps.store.cancel(job.job_id, "cancelled")
    assert near((await lives(steps, job.job_id))[:2], HOUR_MS, HOUR_MS)
    # As an older release ended one: nothing says until when.
    old = await ended(steps)
    key = steps.keys.job(old)
    fields = ("until_ms", "text_until_ms", "text_why", "log_kept_until_ms", "record_ms", "text_ms")
    await steps.redis.hdel(key, *fields)
    record = await steps.store.get(old)
    assert record is not None
    assert (record.until_ms, record.text_until_ms) == (None, None)
    await steps.redis.delete(steps.keys.log(old))
    assert (await end_for_reader(steps, old)).code == "job_lost"
    await steps.redis.hincrby(key, "end_ms", -61_000)  # longer ago than it kept what was read
    assert (await end_for_reader(steps, old)).code == "job_expired"
    await steps.redis.set(steps.keys.tombstone("0-old"), "")
    assert await steps.store.expired("0-old") is None


async def test_an_expired_record_is_known_for_as_long_again_by_its_tombstone(
    frontend: Opened,
) -> None:
    steps = await frontend(record_ms=GONE_MS, text_ms=GONE_MS)
    job_id = await ended(steps, tenant="acme")
    await until(lambda: have_gone(records(steps, job_id)))
    expired = await steps.store.expired(job_id)
    assert expired is not None
    assert expired[:2] == ("acme", "generate")
    assert "PENSTOCK_JOB_RETENTION_S" in expired[-1]
    assert (await end_for_reader(steps, job_id)).code == "job_expired"
    assert near((await steps.redis.pttl(steps.keys.tombstone(job_id)),), 600_000)
    long = await frontend(record_ms=9 * HOUR_MS, text_ms=9 * HOUR_MS)
    kept = await ended(long)
    assert await steps.store.expired(kept) is None  # not yet
    assert near((await steps.redis.pttl(steps.keys.tombstone(kept)),), 10 * HOUR_MS)
    assert await steps.store.forget(kept)
    assert await steps.store.expired(kept) is None  # deleted on request
    assert await steps.store.expired("0-never") is None
    assert await steps.store.expired("not an id") is None


@pytest.mark.promise(
    "Runtime: where Redis is nearly full the oldest texts of ended jobs go first, then their "
    "records; nothing goes that a request asked to keep"
)
async def test_when_redis_is_nearly_full_the_oldest_texts_go_first_then_records(
    steps: Steps,
) -> None:
    jobs = [await ended(steps, "a" * 10_000, tenant=f"t{index % 2}") for index in range(6)]
    await grow_old(steps)
    of_all = await held(steps, "t0") + await held(steps, "t1")
    await set_memory(steps, limit=10 * MEGABYTE, used=8 * MEGABYTE + 25_000)
    await evict(steps)
    assert await texts(steps, *jobs) == [False, False, False, True, True, True]
    assert await records(steps, *jobs) == [True] * 6
    left = await held(steps, "t0") + await held(steps, "t1")
    assert 30_000 < of_all - left < 31_000
    for tenant, own in (("t0", jobs[::2]), ("t1", jobs[1::2])):
        assert await held(steps, tenant) == await counted(steps, *own)
    end = await end_for_reader(steps, jobs[0])
    assert end.code == "job_expired"
    assert "maxmemory" in end.message
    await grow_old(steps)
    await set_memory(steps, limit=10 * MEGABYTE, used=8 * MEGABYTE + 38_000)
    await evict(steps)
    assert await texts(steps, *jobs) == [False] * 6
    assert await records(steps, *jobs) == [False, False, True, True, True, True]
    expired = await steps.store.expired(jobs[0])
    assert expired is not None
    assert "maxmemory" in expired[-1]
    assert [record.job_id for record in (await steps.search.find(JobFilter(), 9)).records] == jobs[
        :1:-1
    ]
    for tenant in ("t0", "t1"):
        await pass_time(steps, tenant)
    await steps.store.reap()
    assert (await held(steps, "t0"), await held(steps, "t1")) == (0, 0)


async def evict(steps: Steps) -> None:
    """What a reap does where the memory is as `set_memory` says: a real one would look again."""
    redis, keys = steps.redis, steps.keys
    source = steps.transport.store._scripts._sources["reap"]
    assert "sample_store()\nevict_oldest()" in source
    await redis.eval(
        source.replace("sample_store()\nevict_oldest()", "evict_oldest()"),
        1,
        keys.live,
        keys.prefix,
        HOUR_MS,
        "",
    )


async def test_what_was_not_read_is_kept_for_ten_minutes_and_what_was_for_one(
    steps: Steps,
) -> None:
    waiting = await ended(steps, "a" * 10_000)
    read = await ended(steps, "a" * 10_000, frontend="fe1#1", on_disconnect=OnDisconnect.GRACE)
    await steps.store.detach(read, "fe1#1")
    await set_memory(steps, limit=10 * MEGABYTE, used=9 * MEGABYTE)
    for ms, left in ((50_000, [True, True]), (11_000, [True, False]), (540_000, [False, False])):
        await grow_old(steps, ms)
        await evict(steps)
        assert await texts(steps, waiting, read) == left


async def test_a_text_that_shall_not_be_stored_goes_a_minute_after_it_was_read(
    steps: Steps,
) -> None:
    job_id = await ended(
        steps, "a" * 5000, text_ms=600_000, frontend="fe1#1", on_disconnect=OnDisconnect.GRACE
    )
    whole = await held(steps)
    assert near(await lives(steps, job_id), HOUR_MS, 600_000, 600_000)
    await steps.store.detach(job_id, "fe1#1")
    assert near(await lives(steps, job_id), HOUR_MS, 60_000, 60_000)
    record = await steps.record(job_id)
    assert record.until_ms is not None
    assert record.text_until_ms is not None
    assert record.until_ms - record.text_until_ms >= HOUR_MS - 60_000 - 5000
    assert await held(steps) == whole == await counted(steps, job_id)
    times = await steps.redis.hgetall(f"{steps.keys.prefix}kept:default")
    assert int(times[min(times, key=int)]) == 5034  # the text goes first


async def test_a_job_that_asked_for_its_time_is_never_evicted(steps: Steps) -> None:
    own = await ended(steps, retain_ms=HOUR_MS)
    await grow_old(steps)
    await set_memory(steps, limit=10 * MEGABYTE, used=10 * MEGABYTE)
    await evict(steps)
    assert (await texts(steps, own), await records(steps, own)) == ([True], [True])


async def test_a_new_job_is_not_refused_for_old_texts(steps: Steps) -> None:
    """As under a shorter retention: what need not be kept makes room, its own tenant's first."""
    other = await ended(steps, "b" * 200_000, tenant="b")
    old = [await ended(steps, "a" * 200_000, tenant="a") for _ in range(4)]
    wanted: dict[str, Any] = {"tenant": "a", "request_record": "x" * 200_000, "retain_ms": HOUR_MS}
    limits = AdmissionLimits(max_store_share_per_tenant=0.5)
    await set_memory(steps, limit=20 * MEGABYTE // 10, used=MEGABYTE)
    with pytest.raises(QueueFull, match="tenant_store"):
        await steps.submit(limits=limits, **wanted)  # they are too young
    await grow_old(steps)
    await steps.submit(limits=limits, **wanted)
    assert (await texts(steps, other, *old[:1]), await texts(steps, old[-1])) == (
        [True, False],
        [True],
    )
    # Where all is nearly full, the oldest of all.
    await set_memory(steps, limit=10 * MEGABYTE, used=9 * MEGABYTE + 100_000)
    await steps.submit(limits=SHARED, tenant="c", request_record="x" * 9000, retain_ms=HOUR_MS)
    assert await texts(steps, other) == [False]


async def test_tenants_whose_lists_have_expired_keep_no_text_from_going(steps: Steps) -> None:
    """Their names stay with an old time: first in the order, and nothing of them may go."""
    prefix = steps.keys.prefix
    due = await ended(steps, "a" * 10_000, tenant="due")
    back = await ended(steps, "a" * 10_000, tenant="back")
    await grow_old(steps)
    for tenant in ("idle0", "idle1", "idle2"):
        await steps.redis.zadd(f"{prefix}texts", {tenant: 1})
    await steps.redis.zadd(f"{prefix}texts", {"back": 2})
    (later,) = [
        score + 4 * HOUR_MS
        for _, score in await steps.redis.zrange(f"{prefix}texts:back", 0, -1, withscores=True)
    ]
    await steps.redis.zadd(f"{prefix}texts:back", {back: later})
    await set_memory(steps, limit=10 * MEGABYTE, used=9 * MEGABYTE)
    await evict(steps)
    assert await texts(steps, due, back) == [False, True]
    assert await steps.redis.zrange(f"{prefix}texts", 0, -1, withscores=True) == [(b"back", later)]


async def test_a_refused_submit_evicts_nothing_of_others(steps: Steps) -> None:
    old = await ended(steps, "a" * 200_000, tenant="a")
    limits = AdmissionLimits(requests_per_minute=1)
    await steps.submit(limits=limits, tenant="b")
    await grow_old(steps)
    await set_memory(steps, limit=10 * MEGABYTE, used=9 * MEGABYTE + 100_000)
    with pytest.raises(QueueFull, match="requests_per_minute"):
        await steps.submit(limits=limits, tenant="b", retain_ms=HOUR_MS)
    assert await texts(steps, old) == [True]


async def test_a_job_that_was_deleted_is_listed_no_longer(steps: Steps) -> None:
    gone, kept = await ended(steps), await ended(steps)
    await steps.redis.delete(steps.keys.log(kept))
    await ended(steps)  # which lists the record of the one without a text
    for job_id in (gone, kept):
        assert await steps.store.forget(job_id)
    for kind in ("texts", "records"):
        listed = await steps.redis.zrange(f"{steps.keys.prefix}{kind}:default", 0, -1)
        assert not {gone.encode(), kept.encode()} & set(listed)


async def test_the_names_of_tenants_that_send_nothing_more_are_dropped(steps: Steps) -> None:
    for index in range(5):
        await ended(steps, tenant=f"gone{index}")
        await steps.redis.delete(f"{steps.keys.prefix}texts:gone{index}")
    await grow_old(steps)
    for _ in range(5):
        await ended(steps, tenant="busy")
    assert await steps.redis.zrange(f"{steps.keys.prefix}texts", 0, -1) == [b"busy"]


async def test_what_has_expired_is_listed_no_longer(frontend: Opened) -> None:
    steps = await frontend(text_ms=GONE_MS)
    gone = [await ended(steps) for _ in range(5)]
    await until(lambda: have_gone(texts(steps, *gone)))
    for _ in range(5):
        await ended(steps)
    listed = await steps.redis.zrange(f"{steps.keys.prefix}texts:default", 0, -1)
    assert not {member.decode() for member in listed} & set(gone)
    next_to_go = await steps.redis.zrange(f"{steps.keys.prefix}records:default", 0, -1)
    assert {member.decode() for member in next_to_go} >= set(gone)
