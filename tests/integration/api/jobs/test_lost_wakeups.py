"""Frames that a stream never hears: what is in the store reaches its reader all the same.

A real server; the bus subscribes there, and gives nothing of what it hears. How soon a loss is seen
is shown by tests/unit/api/jobs/test_quiet_streams.py, whose clock is exact.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.jobs.accepted_jobs import AcceptedJobs
from api.jobs.admission import Admission, DurableAccept
from api.jobs.disconnects import DisconnectTracker
from api.jobs.event_stream import JobStream
from api.jobs.relay import MAX_SILENCES, EventRelay
from shared.messages import START, Delta, Durability, ErrorCode, Failed, Finished, JobState
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.jobs import RESYNC, JobEvent, Resync, Subscription
from tests.support.jobs import Stream
from tests.support.redis_server import namespace, redis_url  # noqa: F401
from tests.support.transport_steps import FINISHED, Steps

SILENCE_S = 0.2
PATIENCE_S = 30.0


class DeafSubscription:
    """Hears the confirmations alone."""

    def __init__(self, heard: Subscription) -> None:
        self.heard = heard

    num_waiting = 0

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        item = await self.heard.get(timeout_s)
        return item if item is RESYNC else None

    def wake(self) -> None:
        self.heard.wake()


class DeafBus:
    """Over a real one."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    async def subscribe(self, job_id: str) -> DeafSubscription:
        return DeafSubscription(await self._bus.subscribe(job_id))

    async def unsubscribe(self, subscription: DeafSubscription) -> None:
        await self._bus.unsubscribe(subscription.heard)


@pytest.fixture
async def transport(redis_url: str, namespace: str) -> AsyncIterator[RedisTransport]:  # noqa: F811
    opened = await open_transport(redis_url, namespace=namespace)
    yield opened
    await opened.aclose()


@pytest.fixture
async def relay(transport: RedisTransport) -> AsyncIterator[EventRelay]:
    made = EventRelay(transport.store, DeafBus(transport.bus), silence_s=SILENCE_S)  # type: ignore[arg-type]
    yield made
    await made.aclose()


def admission_over(transport: RedisTransport) -> Admission:
    store = transport.store
    durable = DurableAccept(store, Durability.NONE, 1, 5.0)
    limits = AdmissionLimits(max_queued_jobs=0)  # a job that was accepted is not asked again
    return Admission(
        store, lambda _: limits, DisconnectTracker(store).cancel, AcceptedJobs(store).add, durable
    )


async def quiet(relay: EventRelay, job_id: str) -> JobStream:
    """A stream whose looks are as seldom as they get."""
    stream = await relay.open(job_id, START)
    assert await read(stream, 3 * MAX_SILENCES * SILENCE_S) == []
    return stream


async def read(stream: JobStream, for_s: float = PATIENCE_S) -> list[Delta | Finished | Failed]:
    """What comes until the end, or until nothing has come for so long."""
    events: list[Delta | Finished | Failed] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not stream.ended:
        assert time.monotonic() < deadline_s, "it does not end"
        event = await stream.get(for_s)
        if event is None:
            break
        events.append(event)
    return events


async def test_text_and_end_whose_frames_were_lost_are_read(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    delivery = await steps.running()
    stream = await quiet(relay, delivery.job.job_id)
    reads = relay.counts.idle_reads
    written = Stream(delivery)
    await steps.say("w1", written, [5], "a")
    first = await stream.get(PATIENCE_S)
    assert isinstance(first, Delta)
    await steps.say("w1", written, [6], "b")
    await steps.say("w1", written, [], "", end=FINISHED)
    *deltas, end = await read(stream)
    assert "".join(delta.text for delta in (first, *deltas)) == "ab"  # type: ignore[union-attr]
    assert isinstance(end, Finished)
    assert relay.counts.idle_reads > reads
    await stream.aclose()


async def test_a_cancel_with_a_lost_frame_still_arrives(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    job_id = (await steps.submit()).job_id
    stream = await quiet(relay, job_id)
    await steps.store.cancel(job_id, "cancelled")
    (end,) = await read(stream)
    assert isinstance(end, Failed)
    assert end.state is JobState.CANCELLED
    await stream.aclose()


async def test_a_job_that_vanished_is_lost_or_submitted_again(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    lost, kept = [await steps.submit() for _ in range(2)]
    resubmit = admission_over(transport).resubmit_of(kept, "fe#1")
    ending = await quiet(relay, lost.job_id)
    going_on = await relay.open(kept.job_id, START, None, resubmit)
    deadline_ms = int((await steps.hash(kept.job_id))["deadline_ms"])
    await steps.redis.delete(steps.keys.job(lost.job_id), steps.keys.job(kept.job_id))
    (end,) = await read(ending)
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.JOB_LOST
    assert await read(going_on, 3 * MAX_SILENCES * SILENCE_S) == []
    again = await steps.hash(kept.job_id)
    assert (again["state"], again["fe"]) == ("queued", "fe#1")
    # It was lost after three seconds of its timeout, and got no more than the rest.
    assert int(again["deadline_ms"]) - deadline_ms < 1000
    for stream in (ending, going_on):
        await stream.aclose()


async def test_a_job_that_was_deleted_unheard_does_not_run_again(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    job = await steps.submit()
    resubmit = admission_over(transport).resubmit_of(job, "fe#1")
    stream = await relay.open(job.job_id, START, None, resubmit)
    await steps.store.cancel(job.job_id, "cancelled")
    assert await steps.store.forget(job.job_id)
    (end,) = await read(stream)
    assert isinstance(end, Failed)
    assert not await steps.hash(job.job_id)
    await stream.aclose()


async def test_a_log_that_is_gone_is_missed_at_the_end_of_its_job(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    delivery = await steps.running()
    stream = await quiet(relay, delivery.job.job_id)
    written = Stream(delivery)
    await steps.say("w1", written, [5, 6], "ab")
    await steps.say("w1", written, [], "", end=FINISHED)
    await steps.redis.delete(steps.keys.log(written.job_id))
    *deltas, end = await read(stream)
    if deltas:  # they were read before they went
        assert isinstance(end, Finished)
    else:
        assert isinstance(end, Failed)
        assert end.code == ErrorCode.JOB_LOST
    await stream.aclose()


async def test_another_history_of_the_same_length_is_noticed_after_a_rollback(
    transport: RedisTransport, relay: EventRelay
) -> None:
    steps = Steps(transport)
    delivery = await steps.running()
    stream = await relay.open(delivery.job.job_id, START)
    await steps.say("w1", Stream(delivery), [5], "a")
    assert await stream.get(PATIENCE_S) is not None
    job_key, log_key = steps.keys.job(delivery.job.job_id), steps.keys.log(delivery.job.job_id)
    await steps.redis.delete(log_key)
    await steps.redis.hset(job_key, mapping={"n": 0, "b": 0, "h": ""})
    await steps.redis.client_kill_filter(_type="pubsub")
    resyncs = relay.counts.resyncs
    while relay.counts.resyncs == resyncs:
        assert await stream.get(0.05) is None
    assert await read(stream, 3 * SILENCE_S) == []  # the log is too short to be compared
    await steps.say("w1", Stream(delivery), [9], "z")
    (end,) = await read(stream)
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.STREAM_DIVERGED
    await stream.aclose()
