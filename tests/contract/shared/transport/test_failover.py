"""The server that had everything dies or is replaced, and the stream goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from shared.messages import START, Delta, Finished, Job
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import RESYNC, Subscription, TransportError
from shared.transport.ports.queue import Append, AppendStatus
from tests.support.jobs import LIMITS, Stream, make_job
from tests.support.polling import until
from tests.support.redis_topologies import SERVICE, ClusterSetup, SentinelSetup
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, whole_log

WAIT_S = 15.0
RETRY_S = 0.05
NUM_TALKERS = 12
MIN_DELTAS = 40  # of which some are said before, some after the change


@pytest.fixture
def sentinels() -> Iterator[SentinelSetup]:
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSetup]:
    with ClusterSetup() as setup:
        yield setup


@contextlib.asynccontextmanager
async def both_sides(url: str) -> AsyncIterator[tuple[Steps, RedisTransport]]:
    """A worker's steps and a frontend's transport, as two processes have them."""
    worker, frontend = await open_transport(url), await open_transport(url)
    try:
        yield Steps(worker), frontend
    finally:
        await worker.aclose()
        await frontend.aclose()


class Talker:
    """A worker with one job: says one letter after the other, and again what the log has lost."""

    def __init__(self, steps: Steps, stream: Stream) -> None:
        self._steps = steps
        self._stream = stream
        self._said: list[Append] = []
        self.enough = asyncio.Event()
        self.num_logged = 0
        self.num_refused = 0

    async def run(self) -> str:
        """The whole text, once the log has it with its end."""
        number = 0
        while True:
            is_last = number >= MIN_DELTAS and self.enough.is_set()
            item = self._stream.append(
                [number], chr(97 + number % 26), end=FINISHED if is_last else None
            )
            self._stream.accept(item)
            self._said.append(item)
            await self._log(number)
            number += 1
            self.num_logged = number
            if is_last:
                return "".join(output.delta.text for output in self._said)
            await asyncio.sleep(0.005)

    async def _log(self, at: int) -> None:
        while at < len(self._said):
            try:
                (result,) = await self._steps.queue.append("w1", LEASE_MS, [self._said[at]])
            except TransportError:
                self.num_refused += 1
                await asyncio.sleep(RETRY_S)
                continue
            if result.status is AppendStatus.GAP:
                at = result.num_tokens  # one token each
                continue
            assert result.status is AppendStatus.OK, result
            at += 1


async def relayed(
    transport: RedisTransport, job_id: str, subscription: Subscription
) -> tuple[str, int, int]:
    """The text as a reader puts it together; how many ends it saw; how many resyncs."""
    text, cursor, ends, resyncs = "", START, 0, 0
    while not ends:
        event = await subscription.get(0.5)
        events: Any = [event]
        if event is RESYNC or event is None or getattr(event, "start", cursor) > cursor:
            resyncs += event is RESYNC
            try:
                events = await transport.store.read_log(job_id, cursor, 4096)
            except TransportError:
                await asyncio.sleep(RETRY_S)
                continue
        for one in events:
            if isinstance(one, Delta) and one.start == cursor:
                text += one.text
                cursor = one.end
            elif isinstance(one, Finished):
                ends += 1
                assert one.end == cursor
    return text, ends, resyncs


async def assert_the_stream_survives(url: str, change: Callable[[Talker], Awaitable[None]]) -> None:
    """The text is whole, ends once, and goes on live at the new home."""
    async with both_sides(url) as (steps, frontend):
        stream = Stream(await steps.running())
        job_id = stream.job_id
        waiting = await steps.submit()
        subscription = await frontend.bus.subscribe(job_id)
        reading = asyncio.create_task(relayed(frontend, job_id, subscription))
        talker = Talker(steps, stream)
        talking = asyncio.create_task(talker.run())

        async def says_more() -> bool:
            assert not talking.done() or talking.result()  # not before it was stopped by a signal
            return talker.num_logged > output

        async def frontend_heartbeats() -> bool:
            with contextlib.suppress(TransportError):
                await frontend.store.frontend_heartbeat("f1", LEASE_MS)
                return True
            return False

        async def worker_heartbeats() -> bool:  # not repeated by itself: the next one is due
            with contextlib.suppress(TransportError):
                await steps.heartbeat("w1")
                return True
            return False

        output = 10
        await until(says_more)
        await change(talker)
        await until(frontend_heartbeats)
        output = talker.num_logged + 5
        await until(says_more, timeout_s=WAIT_S)
        talker.enough.set()
        text = await asyncio.wait_for(talking, WAIT_S)
        heard, ends, resyncs = await asyncio.wait_for(reading, WAIT_S)
        assert (heard, ends) == (text, 1)
        if resyncs < 2:  # the first confirmation; the new home's may come after the end
            while await subscription.get(WAIT_S) is not RESYNC:
                pass
        log = await whole_log(steps, job_id)
        assert "".join(event.text for event in log if isinstance(event, Delta)) == text
        assert isinstance(log[-1], Finished)
        await until(worker_heartbeats, timeout_s=WAIT_S)
        (delivery,) = await steps.pull("w1")
        assert delivery.job == waiting
        await steps.assert_counters_true()
        # What was heard live came over a connection to the new home.
        again = await frontend.bus.subscribe(waiting.job_id)
        assert await again.get(WAIT_S) is RESYNC
        await steps.say("w1", Stream(delivery), [5], "x")
        assert isinstance(await again.get(WAIT_S), Delta)
        assert frontend.bus.reconnects >= 1


async def test_a_killed_primarys_replica_takes_over_in_the_middle_of_a_stream(
    sentinels: SentinelSetup,
) -> None:
    primary = sentinels.primary()

    async def kill(_: Talker) -> None:
        await asyncio.to_thread(primary.kill)

    await assert_the_stream_survives(sentinels.url, kill)
    assert sentinels.primary() is not primary


async def test_a_demoted_primary_that_lives_on_is_left(sentinels: SentinelSetup) -> None:
    primary = sentinels.primary()

    async def demote(_: Talker) -> None:
        sentinels.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", SERVICE)

        async def is_replaced() -> bool:
            return sentinels.primary() is not primary

        await until(is_replaced, timeout_s=WAIT_S)
        # As the sentinels do after ten seconds, but nobody's connection is closed: writes are
        # refused, and a subscriber would hear from a replica for ever.
        primary.client.replicaof("127.0.0.1", sentinels.primary().port)

    await assert_the_stream_survives(sentinels.url, demote)
    assert sentinels.primary() is not primary


async def test_a_clusters_slot_moves_in_the_middle_of_a_stream(cluster: ClusterSetup) -> None:
    cluster.heal()
    before = cluster.owner()
    to = next(n for n in cluster.nodes if n is not before and n.client.role()[0] == b"master")

    async def move(_: Talker) -> None:
        await asyncio.to_thread(cluster.move_slot, to)

    await assert_the_stream_survives(cluster.url, move)
    assert cluster.owner() is to
    await asyncio.to_thread(cluster.move_slot, before)  # back to where the replica is


async def test_a_slot_that_moves_key_by_key_under_load_is_an_outage_that_harms_nothing(
    cluster: ClusterSetup,
) -> None:
    """Between the first key and the last a transition would find only a part of its own."""
    cluster.heal()
    before = cluster.owner()
    to = next(n for n in cluster.nodes if n is not before and n.client.role()[0] == b"master")
    async with both_sides(cluster.url) as (steps, frontend):
        await steps.worker("w1")
        jobs = [await steps.submit() for _ in range(NUM_TALKERS)]
        talkers = [
            Talker(steps, Stream(delivery)) for delivery in await steps.pull("w1", NUM_TALKERS)
        ]
        talking = [asyncio.create_task(talker.run()) for talker in talkers]
        moving = asyncio.create_task(asyncio.to_thread(cluster.move_key_by_key, to, 0.03))
        more: list[Job] = []
        while not moving.done():
            more.append(make_job())
            await _insisting(partial(frontend.store.submit, more[-1], LIMITS, ""))
            cancelled = make_job()
            await _insisting(partial(frontend.store.submit, cancelled, LIMITS, ""))
            await _insisting(partial(frontend.store.cancel, cancelled.job_id, "cancelled"))
        await moving
        for talker in talkers:
            talker.enough.set()
        async with asyncio.timeout(WAIT_S):
            texts = await asyncio.gather(*talking)
        assert cluster.owner() is to
        for job, text in zip(jobs, texts, strict=True):
            log = await whole_log(steps, job.job_id)
            assert "".join(event.text for event in log if isinstance(event, Delta)) == text
            assert [type(event) for event in log if not isinstance(event, Delta)] == [Finished]
        await _insisting(lambda: steps.heartbeat("w1"))
        taken = [d.job for _ in more for d in await steps.pull("w1", 1)]
        assert {job.job_id for job in taken} >= {job.job_id for job in more}
        await steps.assert_counters_true()
        assert sum(talker.num_refused for talker in talkers) > 0, "nothing met the move"
    await asyncio.to_thread(cluster.move_slot, before)


async def _insisting(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a call that is repeated through an outage."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except TransportError:
                await asyncio.sleep(RETRY_S)


async def test_a_killed_cluster_nodes_replica_takes_over_in_the_middle_of_a_stream(
    cluster: ClusterSetup,
) -> None:
    cluster.heal()
    before = cluster.owner()

    async def kill(_: Talker) -> None:
        await asyncio.to_thread(before.kill)

    await assert_the_stream_survives(cluster.url, kill)
    assert cluster.owner() is not before


async def test_a_cluster_whose_home_is_away_says_so_and_heals_with_it(
    cluster: ClusterSetup,
) -> None:
    """A node without a replica: nothing takes over, the partition waits for it."""
    cluster.heal()
    async with both_sides(cluster.url) as (steps, frontend):
        stream = Stream(await steps.running())
        subscription = await frontend.bus.subscribe(stream.job_id)
        assert await subscription.get(WAIT_S) is RESYNC
        assert (await steps.say("w1", stream, [5], "a")).status == "ok"
        home, replica = cluster.owner(), cluster.replica()
        assert home.client.wait(1, 5000) == 1  # either may be the home when they come back
        replica.kill()
        home.kill()
        with pytest.raises(TransportError, match="PrimaryUnknown"):
            await frontend.store.ping()
        await asyncio.to_thread(cluster.heal)

        async def answers() -> bool:
            with contextlib.suppress(TransportError):
                return await frontend.store.ping() > 0
            return False

        await until(answers)
        while await subscription.get(WAIT_S) is not RESYNC:
            pass
        await steps.heartbeat("w1", running=[(stream.job_id, 1)])
        assert (await steps.say("w1", stream, [6], "b", end=FINISHED)).status == "ok"
        assert len(await whole_log(steps, stream.job_id)) == 3
