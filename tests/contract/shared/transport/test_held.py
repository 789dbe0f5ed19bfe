"""The bytes that each tenant has in the store: counted where they are written, and shared out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.messages import OnDisconnect, SamplingParams
from shared.transport.connect import open_transport
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from tests.contract.shared.transport.batch_steps import FILE_LIMITS, new_batch, new_input
from tests.support.jobs import Stream, make_job
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps

SHARED = AdmissionLimits(max_store_share_per_tenant=0.75)
FILES_SHARED = replace(FILE_LIMITS, max_share_per_tenant=0.75)
MEGABYTE = 2**20
HOUR_MS = 3_600_000


@pytest.fixture
async def own() -> AsyncIterator[Steps]:
    """On a server of its own, whose memory a test sets."""
    server = PrivateServer()
    opened = await open_transport(server.start())
    yield Steps(opened)
    await opened.aclose()
    server.stop()


async def held(steps: Steps, tenant: str = "default") -> int:
    return int(await steps.redis.hget(steps.keys.held, tenant) or 0)


async def counted(steps: Steps, *job_ids: str) -> int:
    """Returns what the jobs' records say that they hold."""
    fields = [await steps.hash(job_id) for job_id in job_ids]
    return sum(int(job["held"]) + int(job["held_log"]) for job in fields)


async def pass_time(steps: Steps, tenant: str = "default") -> None:
    """All that is kept of a tenant expires."""
    kept = f"{steps.keys.prefix}kept:{tenant}"
    for field, size in (await steps.redis.hgetall(kept)).items():
        await steps.redis.hdel(kept, field)
        await steps.redis.hincrby(kept, int(field) - 100 * 24 * HOUR_MS, int(size))
    await steps.redis.zadd(f"{steps.keys.prefix}kept", {tenant: 1})


async def running(steps: Steps, **job: Any) -> Stream:
    await steps.worker("w1")
    await steps.submit(**job)
    (delivery,) = await steps.pull("w1")
    return Stream(delivery)


async def set_memory(steps: Steps, *, limit: int, used: int) -> None:
    """As the server would say of itself at the last look."""
    fields = {"store_limit": limit, "store_used": used, "store_grown": 0}
    await steps.redis.hset(steps.keys.stat, mapping=fields)


async def refusal(steps: Steps, limits: AdmissionLimits = SHARED, **job: Any) -> str:
    with pytest.raises(QueueFull) as caught:
        await steps.store.submit(make_job(**job), limits, "")
    return caught.value.scope


async def test_a_job_holds_its_bytes_until_its_record_expires(steps: Steps) -> None:
    stream = await running(steps, request_record="x" * 5000)
    before = await held(steps)
    assert before == await counted(steps, stream.job_id)
    assert before > 5000 + 64 * 34
    await steps.say("w1", stream, [5], "a" * 700, end=FINISHED)
    after = await held(steps)
    assert after == await counted(steps, stream.job_id)
    assert 5700 < after < before + 1000  # the output has ended, and is not expected any more
    await steps.store.reap()
    assert await held(steps) == after
    await pass_time(steps)
    await steps.store.reap()
    assert await held(steps) == 0
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_a_log_that_grows_past_what_was_expected_counts(steps: Steps) -> None:
    stream = Stream(await steps.running(sampling=SamplingParams(max_tokens=4, seed=7)))
    before = await held(steps)
    await steps.say("w1", stream, [5], "é" * 50_000)
    assert await held(steps) >= before + 90_000
    assert await held(steps) == await counted(steps, stream.job_id)


async def test_log_probabilities_are_expected_to_take_their_bytes(
    steps: Steps,
) -> None:
    await steps.submit(tenant="plain")
    await steps.submit(tenant="logs", sampling=SamplingParams(max_tokens=64, seed=7, logprobs=20))
    assert await held(steps, "logs") >= await held(steps, "plain") + 64 * 20 * 30


async def test_what_is_forgotten_is_not_held_and_a_reader_who_leaves_changes_nothing(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running(frontend="fe1#1", on_disconnect=OnDisconnect.GRACE))
    await steps.say("w1", stream, [5], "a" * 50_000, end=FINISHED)
    whole = await held(steps)
    await steps.store.detach(stream.job_id, "fe1#1")
    assert await held(steps) == whole
    assert whole > 50_000
    assert await steps.store.forget(stream.job_id)
    assert await held(steps) == 0
    assert await steps.redis.hgetall(f"{steps.keys.prefix}kept:default") == {}


async def test_a_renewed_response_is_held_for_longer(steps: Steps) -> None:
    stream = await running(steps, request_record="{}", retain_ms=HOUR_MS)
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    before = (await steps.hash(stream.job_id))["kept_until_ms"]
    await steps.redis.hset(steps.keys.job(stream.job_id), "retain_ms", 30 * HOUR_MS)
    await steps.store.renew([stream.job_id])
    after = (await steps.hash(stream.job_id))["kept_until_ms"]
    assert int(after) > int(before) + 20 * HOUR_MS
    assert await held(steps) == await counted(steps, stream.job_id)


async def test_batches_and_files_hold_their_records(steps: Steps) -> None:
    file_id = await new_input(steps.transport, "t")
    of_file = await held(steps, "t")
    assert of_file > 0
    batch = await new_batch(steps.transport, file_id, tenant="t", metadata={"a": "b" * 500})
    assert await held(steps, "t") > of_file + 500
    await steps.transport.batches.cancel(batch.batch_id, "t")
    assert await steps.transport.batches.drop(batch.batch_id, "t")
    assert not await steps.transport.batches.drop(batch.batch_id, "t")
    assert await held(steps, "t") == of_file
    await steps.transport.files.drop(file_id, "t")
    assert await held(steps, "t") == 0


async def test_a_tenant_has_at_most_its_share_of_what_is_its_own_or_free(
    steps: Steps,
) -> None:
    await set_memory(steps, limit=10 * MEGABYTE, used=0)
    record = "x" * 100_000
    greedy: dict[str, Any] = {"request_record": record, "retain_ms": HOUR_MS, "tenant": "greedy"}
    with suppress(QueueFull):
        for _ in range(200):
            await steps.submit(limits=SHARED, **greedy)
    assert await refusal(steps, **greedy) == "tenant_store"
    assert 0.7 <= await held(steps, "greedy") / (10 * MEGABYTE) <= 0.76
    for tenant in ("b", "c"):
        await steps.submit(limits=SHARED, request_record=record, retain_ms=HOUR_MS, tenant=tenant)
    # Its batches and files are of the same share.
    with pytest.raises(QueueFull, match="tenant_store"):
        await new_input(steps.transport, "greedy", limits=FILES_SHARED)


async def test_the_reserve_is_for_small_jobs_that_keep_nothing(
    steps: Steps,
) -> None:
    await set_memory(steps, limit=100 * MEGABYTE, used=95 * MEGABYTE)
    assert await refusal(steps, retain_ms=HOUR_MS) == "store"
    assert await refusal(steps, prompt_token_ids=tuple(range(30_000))) == "store"
    with pytest.raises(QueueFull, match="store"):
        await new_input(steps.transport, "t", limits=FILES_SHARED)
    await steps.worker("w1")
    job = await steps.submit(limits=SHARED)
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
    assert await steps.redis.pttl(steps.keys.job(job.job_id)) <= 60_000
    # One that holds more than the reserve's size has its own share, not the reserve.
    await steps.redis.hset(steps.keys.held, "greedy", 11 * MEGABYTE)
    assert await refusal(steps, tenant="greedy") == "tenant_store"


async def test_the_servers_own_memory_is_what_counts(own: Steps) -> None:
    await own.worker("w1")
    await own.redis.setrange("ballast", 60 * MEGABYTE, b"x")  # allocated by the server
    await own.redis.config_set("maxmemory", 64 * MEGABYTE)
    await own.store.reap()
    stats = await own.registry.queue_stats()
    assert stats.store_limit == 64 * MEGABYTE
    assert 60 * MEGABYTE < stats.store_used < 64 * MEGABYTE
    assert await refusal(own, retain_ms=HOUR_MS) == "store"
    await own.submit(limits=SHARED)
    assert (await own.registry.queue_stats()).held_by_tenant["default"] == await held(own)
