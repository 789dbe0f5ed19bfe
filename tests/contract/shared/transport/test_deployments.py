"""The promises of the transitions, kept behind sentinels and in a cluster too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from shared.keys import Keys
from shared.messages import START, JobState, OnDisconnect, Started
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import RESYNC, TransportError
from shared.transport.ports.registry import AnnouncedModel
from tests.support.jobs import MODEL, Stream
from tests.support.polling import until
from tests.support.redis_server import assert_every_key_expires, new_namespace
from tests.support.redis_topologies import ClusterSetup, SentinelSetup
from tests.support.transport_steps import (
    FINISHED,
    WAIT_S,
    Steps,
    assert_a_channel_left_is_heard_again,
    whole_log,
)


@pytest.fixture(scope="module")
def sentinels() -> Iterator[SentinelSetup]:
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSetup]:
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture(params=["sentinels", "cluster"])
def deployment(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def steps(deployment: SentinelSetup | ClusterSetup) -> AsyncIterator[Steps]:
    async with opened(deployment.url, new_namespace()) as transport:
        yield Steps(transport)


@contextlib.asynccontextmanager
async def opened(url: str, namespace: str) -> AsyncIterator[RedisTransport]:
    transport = await open_transport(url, namespace=namespace)
    try:
        yield transport
    finally:
        await transport.aclose()


async def test_a_job_is_submitted_heard_and_ended(steps: Steps) -> None:
    bus = steps.transport.bus
    await steps.worker("w1")
    job = await steps.submit()
    subscription = await bus.subscribe(job.job_id)
    (delivery,) = await steps.pull("w1")
    stream = Stream(delivery)
    await steps.say("w1", stream, [5, 6], "a|b")
    await steps.say("w1", stream, [7], "é", end=FINISHED)
    heard = [await subscription.get(WAIT_S) for _ in range(5)]
    assert heard == [RESYNC, Started("w1", 1), *await whole_log(steps, job.job_id)]
    await bus.unsubscribe(subscription)
    record = await steps.record(job.job_id)
    assert (record.state, record.completion_tokens) == (JobState.FINISHED, 3)
    assert [one.job_id for one in await steps.list_jobs(None, 10)] == [job.job_id]
    await steps.assert_counters_true()


async def test_a_channel_left_and_subscribed_to_at_once_is_confirmed_and_heard(
    steps: Steps,
) -> None:
    await assert_a_channel_left_is_heard_again(steps)


async def test_a_waiting_pull_is_woken(steps: Steps) -> None:
    await steps.worker("w1")
    waiting = asyncio.create_task(steps.queue.pull("w1", 1, 5000))
    home = steps.redis

    async def waits() -> bool:
        return any(client["cmd"] == "xread" for client in await home.client_list())

    await until(waits)
    job = await steps.submit()
    (delivery,) = await waiting
    assert delivery.job == job


async def test_a_dead_workers_job_goes_on_and_is_cancelled_by_id(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5, 6], "ab")
    await steps.die("w1")
    await steps.worker("w2")
    (delivery,) = await steps.queue.recover("w2", 8)
    assert (delivery.attempt, delivery.output_token_ids) == (2, (5, 6))
    assert (await steps.say("w1", stream, [7], "c")).status == "fenced"
    hints = steps.queue.cancellations("w2")
    first = asyncio.create_task(anext(hints))
    subscription = await steps.transport.bus.subscribe(stream.job_id)  # so the hint is heard too
    result = await steps.store.cancel(stream.job_id, "cancelled")
    assert result is not None
    assert result.won
    assert await asyncio.wait_for(first, WAIT_S) == stream.job_id
    await steps.transport.bus.unsubscribe(subscription)
    await hints.aclose()  # type: ignore[attr-defined]
    assert len(await steps.store.read_log(stream.job_id, START)) == 2


async def test_a_paused_frontend_is_distinguished_from_a_dead_one(steps: Steps) -> None:
    await steps.worker("w1")
    still, dead = [
        (await steps.submit(frontend="fe1#1", on_disconnect=OnDisconnect.CANCEL)).job_id
        for _ in range(2)
    ]
    assert len(await steps.pull("w1")) == 2
    subscription = await steps.transport.bus.subscribe(still)
    await steps.lose_frontend("fe1")
    assert await steps.heartbeat("w1", running=[(still, 1), (dead, 1)]) == []
    due_ms = [int((await steps.hash(job_id))["orphan_ms"]) for job_id in (still, dead)]
    assert due_ms[0] - due_ms[1] > 15_000
    await steps.transport.bus.unsubscribe(subscription)


async def test_a_model_has_the_engines_of_its_live_workers(steps: Steps) -> None:
    await steps.queue.setup([MODEL])
    await steps.queue.announce(MODEL, b"{}", {})
    for name, stats in {
        "old": {},
        "own": {
            "engine": "penstock",
            "exact_resume": 1,
            "structured_output": 1,
            "max_model_len": 2000,
            "kv_capacity_tokens": 3000,
        },
        "speculating": {
            "engine": "vllm",
            "exact_resume": 0,
            "structured_output": 0,
            "max_model_len": 64,
            "kv_capacity_tokens": 4000,
        },
    }.items():
        await steps.heartbeat(name, stats=stats)
    found = (await steps.registry.models())[MODEL]
    assert (found.engines, found.exact_resume) == (("penstock", "vllm"), False)
    assert (found.max_model_len, found.kv_capacity_tokens) == (64, 3000)
    assert not found.structured_output
    await steps.queue.retire("speculating")
    found = (await steps.registry.models())[MODEL]
    assert (found.engines, found.exact_resume) == (("penstock",), True)
    assert (found.max_model_len, found.kv_capacity_tokens) == (2000, 3000)
    assert found.structured_output


async def test_a_worker_is_seen_with_its_card_until_it_retires(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.queue.announce(MODEL, b"{}", {"digest": b"blob"})
    assert await steps.registry.models() == {MODEL: AnnouncedModel(b"{}", 0.0)}
    assert await steps.registry.get_blob("digest") == b"blob"
    assert [worker.worker_id for worker in await steps.registry.workers()] == ["w1"]
    await steps.queue.retire("w1")
    assert await steps.registry.workers() == []
    assert (await steps.registry.models())[MODEL].unserved_s > 0.0


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.redis.script_flush()
    assert (await steps.say("w1", stream, [5], "a", end=FINISHED)).status == "ok"


async def test_every_key_is_in_the_one_slot_or_documented(
    steps: Steps, deployment: SentinelSetup | ClusterSetup
) -> None:
    await steps.transport.check()
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    namespace = steps.keys.namespace
    found: set[bytes] = set()
    for server in deployment.servers:
        with contextlib.suppress(redis.ResponseError):  # a sentinel has no keys
            found.update(server.client.scan_iter(match=f"{namespace}:*", count=1000))
    prefix = steps.keys.prefix.encode()
    assert [key.decode() for key in found if not key.startswith(prefix)] == [steps.keys.meta]
    await assert_every_key_expires(steps.redis, namespace)


async def test_start_checks_speak_of_what_a_failover_may_lose(sentinels: SentinelSetup) -> None:
    async with opened(sentinels.url, new_namespace()) as transport:
        (warning,) = await transport.check()
        assert "min-replicas-to-write" in warning
        sentinels.primary().client.config_set("min-replicas-to-write", 1)
        try:
            assert await transport.check() == []
        finally:
            sentinels.primary().client.config_set("min-replicas-to-write", 0)


async def test_a_primary_without_its_replicas_writes_again_when_they_are_back(
    sentinels: SentinelSetup,
) -> None:
    primary = sentinels.primary().client
    async with opened(sentinels.url, new_namespace()) as transport:
        steps = Steps(transport)
        stream = Stream(await steps.running())
        primary.config_set("min-replicas-to-write", 2)
        try:
            with pytest.raises(TransportError):
                await steps.say("w1", stream, [5], "a")
        finally:
            primary.config_set("min-replicas-to-write", 0)
        assert await whole_log(steps, stream.job_id) == []
        assert (await steps.say("w1", stream, [5], "a", end=FINISHED)).status == "ok"


async def test_a_cluster_is_sound_and_keeps_its_schema_where_its_slot_is(
    cluster: ClusterSetup,
) -> None:
    namespace = new_namespace()
    async with opened(cluster.url, namespace) as transport:
        assert await transport.check() == []
        async with transport.connections.reaching(Keys(namespace).meta) as client:
            assert await client.hget(Keys(namespace).meta, "schema") == b"1"


async def test_a_clusters_frames_go_to_one_node_alone(cluster: ClusterSetup) -> None:
    async with opened(cluster.url, new_namespace()) as transport:
        steps = Steps(transport)
        stream = Stream(await steps.running())
        subscription = await transport.bus.subscribe(stream.job_id)
        channel = transport.keys.channel(stream.job_id)
        listeners = {
            node.port: node.client.execute_command("PUBSUB", "SHARDNUMSUB", channel)[1]
            for node in cluster.nodes
        }
        home = cluster.owner().port
        assert {port for port, number in listeners.items() if number} == {home}
        broadcast = redis.asyncio.Redis(port=home, protocol=2)
        everywhere = broadcast.pubsub()
        await everywhere.subscribe(channel)
        assert await everywhere.get_message(timeout=WAIT_S) is not None
        await steps.say("w1", stream, [5], "a")
        assert await subscription.get(WAIT_S) is RESYNC
        assert await subscription.get(WAIT_S) is not None
        assert await everywhere.get_message(timeout=0.1) is None
        await everywhere.aclose()
        await broadcast.aclose()
        await transport.bus.unsubscribe(subscription)

        async def nobody_listens() -> bool:
            reply = cluster.owner().client.execute_command("PUBSUB", "SHARDNUMSUB", channel)
            return bool(reply[1] == 0)

        await until(nobody_listens)


async def test_any_one_node_or_sentinel_is_enough_to_find_the_others(
    deployment: SentinelSetup | ClusterSetup,
) -> None:
    scheme, _, rest = deployment.url.partition("://")
    addresses, slash, path = rest.partition("/")
    for address in addresses.split(","):
        url = f"{scheme}://127.0.0.1:1,{address}{slash}{path}"
        async with opened(url, new_namespace()) as transport:
            await Steps(transport).running()
