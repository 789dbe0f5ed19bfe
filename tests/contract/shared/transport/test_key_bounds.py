"""Every key has a TTL or a bound, and the counters tell the truth, after a walk through all."""

from __future__ import annotations

import random

import pytest

from shared.messages import OnDisconnect
from shared.transport.connect import RedisTransport
from shared.transport.job_store import StorePolicy
from tests.support.jobs import Stream
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps


@pytest.mark.promise("Streaming: an ended stream leaves nothing in tables, channels or keys")
async def test_no_key_lives_for_ever_but_the_documented_ones(steps: Steps) -> None:
    namespace = steps.keys.namespace
    if not steps.transport.is_fake:
        await steps.transport.check()
    await steps.worker("w1")
    await steps.queue.announce("a", b"{}", {"abc": b"1"})
    await steps.store.frontend_heartbeat("fe1", 5000)
    await steps.submit(frontend="fe1", on_disconnect=OnDisconnect.GRACE)
    await assert_every_key_expires(steps.redis, namespace)
    stream = Stream((await steps.pull("w1"))[0])
    await steps.say("w1", stream, [5], "a")
    await assert_every_key_expires(steps.redis, namespace)
    await steps.die("w1")
    await steps.worker("w2")
    (taken,) = await steps.queue.recover("w2", 8)
    await steps.attach(stream.job_id, "fe1#1")
    await steps.store.detach(stream.job_id, "fe1#1")
    await assert_every_key_expires(steps.redis, namespace)
    await steps.queue.release("w2", stream.job_id, taken.attempt)
    await assert_every_key_expires(steps.redis, namespace)
    await steps.store.cancel(stream.job_id, "cancelled")
    await steps.queue.retire("w2")
    await assert_every_key_expires(steps.redis, namespace)


async def test_a_long_jobs_keys_outlive_its_deadline(steps: Steps) -> None:
    day_ms = 24 * 3_600_000
    stream = Stream(await steps.running(timeout_ms=2 * day_ms))
    await steps.say("w1", stream, [5], "a")
    keys = steps.keys
    for key in (
        keys.job(stream.job_id),
        keys.request(stream.job_id),
        keys.log(stream.job_id),
        keys.live,
        keys.queue(stream.job_id and "org/tiny:1", 0),
        keys.tenant("default"),
    ):
        assert await steps.redis.pttl(key) > 2 * day_ms, key


async def test_a_log_that_was_deleted_and_grows_again_expires(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    log_key = steps.keys.log(stream.job_id)
    await steps.redis.delete(log_key)
    await steps.say("w1", stream, [6], "b")
    assert await steps.redis.xlen(log_key) == 1
    assert 0 < await steps.redis.pttl(log_key) <= 600_000 + 86_400_000


async def test_an_ended_job_is_kept_for_its_retention_only(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    for key in (steps.keys.job(stream.job_id), steps.keys.log(stream.job_id)):
        assert 0 < await steps.redis.pttl(key) <= StorePolicy().record_ms
    assert await steps.redis.exists(steps.keys.request(stream.job_id)) == 0
    assert await steps.redis.exists(steps.keys.tenant("default")) == 0
    assert await steps.redis.xlen(steps.keys.queue("org/tiny:1", 0)) == 0


async def test_counters_equal_the_hashes_after_a_random_walk(transport: RedisTransport) -> None:
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    steps = Steps(transport)
    streams: dict[str, tuple[str, Stream]] = {}
    ids: list[str] = []
    number = 0
    await steps.worker("w0")
    for step in range(250):
        worker = f"w{number}"
        action = rng.choice("sssppaaafcrdk")
        known = [job_id for job_id, (owner, _) in streams.items() if owner == worker]
        job_id = rng.choice(known) if known else ""
        if action == "s":
            ids.append((await steps.submit(tenant=rng.choice("ab"), lane=rng.randrange(8))).job_id)
        elif action in "pd":
            pulled = [
                *await steps.pull(worker, rng.randrange(1, 4)),
                *await steps.queue.recover(worker, rng.randrange(1, 4)),
            ]
            for delivery in pulled:
                streams[delivery.job.job_id] = (worker, Stream(delivery))
        elif action in "af" and job_id:
            end = FINISHED if action == "f" else None
            result = await steps.say(worker, streams[job_id][1], [step], "é", end=end)
            if end or result.status != "ok":
                del streams[job_id]
        elif action == "c" and ids:
            await steps.store.cancel(rng.choice(ids), "cancelled")
        elif action == "r" and job_id:
            await steps.queue.release(worker, job_id, streams.pop(job_id)[1].attempt)
        elif action == "k":
            await steps.die(worker)
            number += 1
            await steps.worker(f"w{number}")
        try:
            await steps.assert_counters_true()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}, action {action}: {error}") from error
    for job_id in ids:
        await steps.store.cancel(job_id, "cancelled")
    await steps.assert_counters_true()
    for lane in range(8):
        assert await steps.redis.xlen(steps.keys.queue("org/tiny:1", lane)) == 0
