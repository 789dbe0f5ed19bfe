"""EventBus: subscribe before publish, RESYNC whenever something may be missing, never a wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from penstock.launcher.redis_server import PrivateServer
from shared.messages import Delta, Failed, Finished, Started
from shared.redis.pubsub import Subscriber
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.event_bus import QUEUE_FRAMES
from shared.transport.ports.jobs import RESYNC, Subscription, TransportError
from tests.support.jobs import MODEL, Stream
from tests.support.polling import until
from tests.support.transport_steps import (
    FINISHED,
    WAIT_S,
    Steps,
    assert_a_channel_left_is_heard_again,
    whole_log,
)


async def drained(subscription: Subscription) -> list[Any]:
    events = []
    while (event := await subscription.get(0.2)) is not None:
        events.append(event)
    return events


async def test_what_follows_the_confirmation_is_heard_in_order(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    subscription = await steps.transport.bus.subscribe(job.job_id)
    (delivery,) = await steps.pull("w1")
    stream = Stream(delivery)
    await steps.say("w1", stream, [5, 6], "a|b")
    await steps.say("w1", stream, [7], "é", end=FINISHED)
    first, *events = await drained(subscription)
    assert first is RESYNC
    assert events == [Started("w1", 1), *await whole_log(steps, job.job_id)]
    await steps.transport.bus.unsubscribe(subscription)


@pytest.mark.promise("Runtime: every reason has its code in the job and over HTTP")
async def test_every_terminal_transition_is_heard_as_it_is_logged(
    steps: Steps,
) -> None:
    for _ in range(2):
        job = await steps.submit(timeout_ms=1)
        subscription = await steps.transport.bus.subscribe(job.job_id)
        await steps.deadline_passed(job.job_id)
        await steps.store.reap()
        assert await subscription.get(WAIT_S) is RESYNC
        heard = await subscription.get(WAIT_S)
        assert isinstance(heard, Failed)
        assert [heard] == await whole_log(steps, job.job_id)


async def test_two_readers_of_one_job_hear_the_same(steps: Steps) -> None:
    stream = Stream(await steps.running())
    first = await steps.transport.bus.subscribe(stream.job_id)
    second = await steps.transport.bus.subscribe(stream.job_id)
    await steps.say("w1", stream, [5], "a")
    heard = [await drained(one) for one in (first, second)]
    assert heard[0] == heard[1]
    assert heard[0][0] is RESYNC
    await steps.transport.bus.unsubscribe(first)
    await steps.transport.bus.unsubscribe(first)
    await steps.say("w1", stream, [6], "b", end=FINISHED)
    assert [type(event) for event in await drained(second)] == [Delta, Finished]
    assert await drained(first) == []
    await steps.transport.bus.unsubscribe(second)


@pytest.mark.promise("Chat: every buffer towards a reader is bounded")
@pytest.mark.promise("Runtime: a slow consumer costs bounded memory")
async def test_a_slow_reader_gets_resync_in_place_of_what_it_missed(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    slow = await steps.transport.bus.subscribe(stream.job_id)
    fast = await steps.transport.bus.subscribe(stream.job_id)
    assert await fast.get(WAIT_S) is RESYNC
    for number in range(QUEUE_FRAMES + 10):
        await steps.say("w1", stream, [number], "a")
        assert isinstance(await fast.get(WAIT_S), Delta)
    events = await drained(slow)
    assert events[0] is RESYNC
    assert len(events) < QUEUE_FRAMES
    assert isinstance(events[-1], Delta)
    assert events[-1].end == stream.cursor


async def test_get_returns_none_without_an_event(transport: RedisTransport) -> None:
    subscription = await transport.bus.subscribe("0-quiet")
    assert await subscription.get(1.0) is RESYNC
    assert await subscription.get(0.01) is None
    assert await subscription.get(0) is None


async def test_an_unreadable_frame_is_a_resync_and_an_unknown_one_is_nothing(
    transport: RedisTransport,
) -> None:
    subscription = await transport.bus.subscribe("0-odd")
    assert await subscription.get(WAIT_S) is RESYNC
    channel = transport.keys.channel("0-odd")
    redis_client: Any = transport.connections.commands
    for frame in (b"Z|from|a|newer|release", b"D|1|2", b"S|1|w1"):
        await redis_client.publish(channel, frame)
    assert await drained(subscription) == [RESYNC, Started("w1", 1)]


async def test_unsubscribing_the_last_reader_leaves_the_channel(transport: RedisTransport) -> None:
    bus, redis_client = transport.bus, transport.connections.commands
    subscription = await bus.subscribe("0-left")
    await bus.unsubscribe(subscription)

    async def nobody_listens() -> bool:
        channel = transport.keys.channel("0-left")
        return (await redis_client.pubsub_numsub(channel))[0][1] == 0

    await until(nobody_listens)


async def test_a_channel_left_and_subscribed_to_at_once_is_confirmed_and_heard(
    transport: RedisTransport,
) -> None:
    await assert_a_channel_left_is_heard_again(Steps(transport))


async def test_a_killed_connection_comes_back_with_resync(steps: Steps) -> None:
    stream = Stream(await steps.running())
    bus = steps.transport.bus
    subscriptions = [await bus.subscribe(name) for name in (stream.job_id, "0-other")]
    for subscription in subscriptions:
        assert await subscription.get(WAIT_S) is RESYNC
    for round_number in range(3):
        await steps.redis.client_kill_filter(_type="pubsub", skipme=True)
        await steps.say("w1", stream, [round_number], "lost?")
        for subscription in subscriptions:
            while (heard := await subscription.get(WAIT_S)) is not RESYNC:
                assert heard is not None  # it was heard before the end
    assert steps.transport.bus.reconnects >= 3
    await steps.say("w1", stream, [9], "x")
    heard = await subscriptions[0].get(WAIT_S)
    assert isinstance(heard, Delta)
    assert heard.text == "x"


async def test_a_half_open_connection_is_noticed_by_the_watchdog(redis_url: str) -> None:
    """The peer vanishes without a word: only our own PING can tell."""
    real_path = redis_url.removeprefix("unix://")
    holes: list[asyncio.Event] = []
    writers: list[asyncio.StreamWriter] = []

    async def carry(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hole: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            if not hole.is_set():
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(real_path)
        hole = asyncio.Event()
        holes.append(hole)
        writers.extend((writer, server_writer))
        await asyncio.gather(carry(reader, server_writer, hole), carry(server_reader, writer, hole))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    client = redis.asyncio.Redis(host="127.0.0.1", port=port, protocol=2)
    confirmations = 0

    class Listener:
        def on_confirmed(self) -> None:
            nonlocal confirmations
            confirmations += 1

        def on_message(self, data: bytes) -> None:
            pass

    subscriber = Subscriber(client.connection_pool.make_connection, ping_s=0.05, dead_s=0.2)
    listener = Listener()
    await subscriber.add("some-channel", listener)
    await subscriber.confirmed("some-channel", listener)
    assert confirmations == 1
    holes[0].set()

    async def confirmed_again() -> bool:
        return confirmations == 2

    await until(confirmed_again)
    await subscriber.aclose()
    await client.aclose()
    for writer in writers:
        writer.close()
    proxy.close()


async def test_subscribing_fails_in_words_while_the_server_is_away(tmp_path: Any) -> None:
    url = f"unix://{tmp_path}/nothing.sock"
    transport = await open_transport(url)
    with pytest.raises(TransportError, match="not confirmed"):
        await transport.bus.subscribe("0-a")
    with pytest.raises(TransportError, match="ping failed"):
        await transport.store.ping()
    await transport.aclose()


async def test_a_server_that_comes_late_is_found(tmp_path: Any) -> None:
    server = PrivateServer(tmp_path / "data")
    transport = await open_transport(f"unix://{tmp_path}/data/redis.sock")
    await transport.bus.start()
    with pytest.raises(TransportError):
        await transport.store.ping()
    server.start()
    try:
        subscription = await transport.bus.subscribe("0-a")
        assert await subscription.get(WAIT_S) is RESYNC
        assert await transport.store.ping() > 0
    finally:
        await transport.aclose()
        server.stop()


async def test_a_restarted_server_keeps_jobs_and_brings_resync(tmp_path: Any) -> None:
    server = PrivateServer(tmp_path / "data")
    transport = await open_transport(server.start())
    steps = Steps(transport)
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    subscription = await transport.bus.subscribe(stream.job_id)
    assert await subscription.get(WAIT_S) is RESYNC
    server.stop()
    server = PrivateServer(tmp_path / "data")
    server.start()
    try:
        while (heard := await subscription.get(WAIT_S)) is not RESYNC:
            assert heard is not None  # it was heard before the end
        await steps.heartbeat("w1", running=[(stream.job_id, 1)])
        assert (await steps.say("w1", stream, [6], "b", end=FINISHED)).status == "ok"
        assert len(await whole_log(steps, stream.job_id)) == 3
        assert await steps.redis.xlen(steps.keys.queue(MODEL, 0)) == 0
    finally:
        await transport.aclose()
        server.stop()


async def test_a_subscription_may_be_confirmed_later_or_never_be_needed(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    job = await steps.submit()
    begun = await steps.transport.bus.begin(job.job_id)
    await steps.transport.bus.confirmed(begun)
    (delivery,) = await steps.pull("w1")
    await steps.say("w1", Stream(delivery), [5, 6], "ab", end=FINISHED)
    first, *events = await drained(begun)
    assert first is RESYNC
    assert events == [Started("w1", 1), *await whole_log(steps, job.job_id)]
    await steps.transport.bus.unsubscribe(begun)
    unneeded = await steps.transport.bus.begin("0-never")
    await steps.transport.bus.unsubscribe(unneeded)

    async def nobody_listens() -> bool:
        redis = steps.transport.connections.commands
        channels = [steps.transport.keys.channel(name) for name in (job.job_id, "0-never")]
        return all(number == 0 for _, number in await redis.pubsub_numsub(*channels))

    await until(nobody_listens)
