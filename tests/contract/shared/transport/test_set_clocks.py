"""The clock of the server is set by an hour, forward or back, while everything runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.messages import Idempotency, JobState, OnDisconnect
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.admission import AdmissionLimits, KeyTaken, QueueFull
from shared.transport.ports.batches import BatchClaim, BatchProgress, BatchStatus
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Delivery
from tests.contract.shared.transport.batch_steps import new_batch
from tests.support.jobs import Stream, make_job
from tests.support.polling import until
from tests.support.settable_clock import SettableClock
from tests.support.transport_steps import FINISHED, Steps

pytestmark = pytest.mark.clock

HOUR_S = 3600
HEARTBEAT_S = 0.2
LEASE_MS = 2000
SHORT_MS = 4000  # longer than it takes to see that the clock was set
# Far less than the hour. While this process gets no processor the server sees one silence after the
# other, and nobody is taken for dead.
PATIENCE_S = 300.0
A_WHILE_S = 3.0  # many heartbeats and reaps
BOTH_WAYS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


class Partition:
    """Workers and frontends, each as a process has it: a transport and heartbeats of its own."""

    def __init__(self, server: PrivateServer, clock: SettableClock) -> None:
        self.clock = clock
        self._server = server
        self._stack = contextlib.AsyncExitStack()
        self._beating: dict[str, asyncio.Task[None]] = {}
        self._dying: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Partition:
        return self

    async def __aexit__(self, *_: object) -> None:
        ended = [task for task in self._beating.values() if task.done()]
        for name in list(self._beating):
            self.die(name)
        if self._dying:  # one that connects meanwhile would leave its connection open
            await asyncio.wait(self._dying)
        await self._stack.aclose()
        for task in ended:  # one that raised: a test would wait in vain for what it does
            task.result()

    async def transport(self) -> RedisTransport:
        opened = await open_transport(self._server.url)
        self._stack.push_async_callback(opened.aclose)
        return opened

    async def worker(self, name: str, recovered: list[Delivery] | None = None) -> Steps:
        """One that sends heartbeats and takes over what the dead have left."""
        steps = Steps(await self.transport())
        await steps.worker(name, lease_ms=LEASE_MS)

        async def heartbeat() -> None:
            await steps.heartbeat(name, lease_ms=LEASE_MS)
            if recovered is not None:
                recovered.extend(await steps.queue.recover(name, 8))

        self._start(name, heartbeat)
        return steps

    async def frontend(self, name: str) -> Steps:
        steps = Steps(await self.transport())

        async def heartbeat() -> None:
            await steps.store.frontend_heartbeat(name, LEASE_MS)
            await steps.store.reap()

        self._start(name, heartbeat)
        await heartbeat()
        return steps

    def die(self, name: str) -> None:
        """Says nothing any more, and nobody is told."""
        self._dying.append(self._beating.pop(name))
        self._dying[-1].cancel()

    def freeze_server(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw_server(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        process = self._server._process
        assert process is not None
        os.kill(process.pid, number)

    def _start(self, name: str, heartbeat: Callable[[], Awaitable[None]]) -> None:
        async def again_and_again() -> None:
            while True:
                with contextlib.suppress(TransportError):
                    await heartbeat()
                await asyncio.sleep(HEARTBEAT_S)

        self._beating[name] = asyncio.create_task(again_and_again())


@pytest.fixture
def clock(tmp_path: Path) -> SettableClock:
    return SettableClock(tmp_path / "clock")


@pytest.fixture
def server(clock: SettableClock) -> Iterator[PrivateServer]:
    made = PrivateServer()
    with clock.governs():
        made.start()
    yield made
    made.stop()


@pytest.fixture
async def partition(server: PrivateServer, clock: SettableClock) -> AsyncIterator[Partition]:
    async with Partition(server, clock) as made:
        yield made


async def states(steps: Steps, jobs: Sequence[str]) -> list[str]:
    return [(await steps.hash(job_id)).get("state", "gone") for job_id in jobs]


async def ended_as(steps: Steps, job_id: str) -> str:
    """The reason of its end, which comes within the patience."""

    async def has_ended() -> bool:
        return (await states(steps, [job_id]))[0] not in ("queued", "running")

    await until(has_ended, timeout_s=PATIENCE_S)
    return (await steps.hash(job_id)).get("reason", "gone")


@BOTH_WAYS
async def test_no_job_expires_because_the_clock_was_set(partition: Partition, step_s: int) -> None:
    worker, frontend = await partition.worker("w1"), await partition.frontend("f1")
    runs = Stream(await worker.running("w1", timeout_ms=600_000))
    waits = await frontend.submit(timeout_ms=600_000)
    unclaimed = await frontend.submit(timeout_ms=600_000, queue_timeout_ms=300_000)
    read = await frontend.submit("f1#1", timeout_ms=600_000, on_disconnect=OnDisconnect.CANCEL)
    jobs = [runs.job_id, waits.job_id, unclaimed.job_id, read.job_id]
    partition.clock.set(step_s)
    await asyncio.sleep(A_WHILE_S)
    assert await states(frontend, jobs) == ["running", "queued", "queued", "queued"]
    assert (await worker.say("w1", runs, [5], "a", end=FINISHED)).status == "ok"

    async def are_taken() -> bool:
        taken.extend(delivery.job.job_id for delivery in await worker.pull("w1"))
        return len(taken) == 3

    taken: list[str] = []
    await until(are_taken)
    assert taken == jobs[1:]
    # What comes after it has its own deadline.
    late = await frontend.submit(timeout_ms=500)
    assert await ended_as(frontend, late.job_id) == "deadline_exceeded"
    await frontend.assert_counters_true()


@BOTH_WAYS
async def test_a_deadline_that_really_passes_ends_its_job_and_not_before(
    partition: Partition, step_s: int
) -> None:
    worker, frontend = await partition.worker("w1"), await partition.frontend("f1")
    begun_s = time.monotonic()
    runs = (await worker.running("w1", timeout_ms=SHORT_MS)).job.job_id
    waits = (await frontend.submit(timeout_ms=SHORT_MS)).job_id
    unclaimed = (await frontend.submit(timeout_ms=600_000, queue_timeout_ms=SHORT_MS)).job_id
    partition.clock.set(step_s)
    for job_id, reason in (
        (runs, "deadline_exceeded"),
        (waits, "deadline_exceeded"),
        (unclaimed, "queue_timeout"),
    ):
        assert await ended_as(frontend, job_id) == reason
        # What was set is known to the time that the calls took which saw it.
        assert (time.monotonic() - begun_s) * 1000 > SHORT_MS - 500


@BOTH_WAYS
async def test_a_worker_that_dies_as_the_clock_is_set_is_missed(
    partition: Partition, step_s: int
) -> None:
    recovered: list[Delivery] = []
    worker, frontend = await partition.worker("w1"), await partition.frontend("f1")
    job = (await worker.running("w1", timeout_ms=600_000)).job
    # `running` gave a longer lease.
    await worker.heartbeat("w1", [(job.job_id, 1)], lease_ms=LEASE_MS)
    await partition.worker("w2", recovered)
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert not recovered
    partition.die("w1")
    partition.clock.set(step_s)

    async def is_taken_over() -> bool:
        return bool(recovered)

    await until(is_taken_over, timeout_s=PATIENCE_S)
    assert [delivery.job for delivery in recovered] == [job]
    assert await states(frontend, [job.job_id]) == ["running"]


@BOTH_WAYS
async def test_the_readers_of_a_frontend_that_dies_as_the_clock_is_set_are_missed(
    partition: Partition, step_s: int
) -> None:
    await partition.worker("w1")
    dies, lives = await partition.frontend("f1"), await partition.frontend("f2")
    plain = {"timeout_ms": 600_000, "on_disconnect": OnDisconnect.CANCEL}
    missed = (await dies.submit("f1#1", **plain)).job_id
    kept = (await lives.submit("f2#1", **plain)).job_id
    await dies.store.frontend_heartbeat("f1", LEASE_MS)  # `submit` of the steps gave a longer one
    await lives.store.frontend_heartbeat("f2", LEASE_MS)
    partition.die("f1")
    partition.clock.set(step_s)
    assert await ended_as(lives, missed) == "orphaned"
    assert await states(lives, [kept]) == ["queued"]


@BOTH_WAYS
async def test_an_allowance_is_neither_locked_nor_saved_up(
    partition: Partition, step_s: int
) -> None:
    limits = AdmissionLimits(requests_per_minute=6)  # one every ten seconds
    await partition.worker("w1")
    frontend = await partition.frontend("f1")
    for _ in range(6):
        await frontend.submit(limits=limits)
    partition.clock.set(step_s)
    await asyncio.sleep(A_WHILE_S)
    answers = await asyncio.gather(
        *(frontend.submit(limits=limits) for _ in range(20)), return_exceptions=True
    )
    refusals = [answer for answer in answers if isinstance(answer, QueueFull)]
    num_admitted = len(answers) - len(refusals)
    for refusal in refusals:
        assert refusal.scope == "requests_per_minute"
        assert refusal.retry_after_s <= 12.0
    # Forward the server lets its record of what was used expire: it fills up once.
    assert num_admitted <= (6 if step_s > 0 else 1)


@BOTH_WAYS
async def test_an_idempotency_key_keeps_naming_its_job(partition: Partition, step_s: int) -> None:
    await partition.worker("w1")
    frontend = await partition.frontend("f1")
    key = Idempotency("key", "body")
    job = await frontend.submit(idempotency=key, timeout_ms=60_000)
    partition.clock.set(step_s)
    await asyncio.sleep(A_WHILE_S)
    with pytest.raises(KeyTaken) as caught:
        await frontend.store.submit(make_job(idempotency=key), AdmissionLimits(), "")
    assert caught.value.job_id == job.job_id


@BOTH_WAYS
async def test_a_batch_keeps_its_window_and_its_owner_until_that_dies(
    partition: Partition, step_s: int
) -> None:
    await partition.worker("w1")
    owner, other = await partition.frontend("f1"), await partition.frontend("f2")
    await new_batch(owner.transport, window_ms=1_800_000)  # half of what the clock is set by
    lease = await owner.transport.batches.claim("f1", LEASE_MS, [])
    assert lease is not None
    left_ms: list[int] = []

    async def save() -> None:
        saved = await owner.transport.batches.save(
            lease, LEASE_MS, BatchProgress(), status=BatchStatus.IN_PROGRESS
        )
        left_ms.append(saved.left_ms)

    await save()
    partition.clock.set(step_s)
    for _ in range(int(A_WHILE_S / HEARTBEAT_S)):
        assert await other.transport.batches.claim("f2", LEASE_MS, []) is None
        await save()
        await asyncio.sleep(HEARTBEAT_S)
    assert 0 <= left_ms[0] - left_ms[-1] < 60_000

    async def takes_over() -> BatchClaim | None:
        return await other.transport.batches.claim("f2", LEASE_MS, [])

    taken = await until(takes_over, timeout_s=PATIENCE_S)
    assert (taken.batch_id, taken.fence) == (lease.batch_id, 2)


async def test_a_clock_that_is_set_forward_and_back_at_once_changes_nothing(
    partition: Partition,
) -> None:
    worker, frontend = await partition.worker("w1"), await partition.frontend("f1")
    begun_s = time.monotonic()
    short = (await worker.running("w1", timeout_ms=2 * SHORT_MS)).job.job_id
    long = (await frontend.submit(timeout_ms=600_000)).job_id
    for offset_s in (HOUR_S, -HOUR_S, 2 * HOUR_S, 0, HOUR_S):
        partition.clock.set(offset_s)
        await asyncio.sleep(1.5 * HEARTBEAT_S)
    assert await states(frontend, [short, long]) == ["running", "queued"]
    assert await ended_as(frontend, short) == "deadline_exceeded"
    assert (time.monotonic() - begun_s) * 1000 > 2 * SHORT_MS - 500
    assert await states(frontend, [long]) == ["queued"]


async def test_a_server_that_was_away_has_not_had_its_clock_set(partition: Partition) -> None:
    """Time has passed: what was due meanwhile ends, and nothing else."""
    worker, frontend = await partition.worker("w1"), await partition.frontend("f1")
    due = (await worker.running("w1", timeout_ms=SHORT_MS)).job.job_id
    stays = (await frontend.submit(timeout_ms=600_000)).job_id
    partition.freeze_server()
    await asyncio.sleep(SHORT_MS / 1000)
    partition.thaw_server()
    assert await ended_as(frontend, due) == "deadline_exceeded"
    assert await states(frontend, [stays]) == ["queued"]
    assert await frontend.redis.hget(frontend.keys.pulse, "skew_ms") is None


async def test_without_live_jobs_times_follow_the_clock_again(
    partition: Partition,
) -> None:
    await partition.worker("w1")
    frontend = await partition.frontend("f1")
    job = await frontend.submit(timeout_ms=600_000)
    partition.clock.set(HOUR_S)

    async def skew() -> bytes | None:
        kept: bytes | None = await frontend.redis.hget(frontend.keys.pulse, "skew_ms")
        return kept

    known = await until(skew)
    assert abs(int(known) - HOUR_S * 1000) < 2000
    await frontend.store.cancel(job.job_id, "cancelled")

    async def is_forgotten() -> bool:
        return await skew() is None

    await until(is_forgotten)
    after = await frontend.submit(timeout_ms=600_000)
    record = await frontend.store.get(after.job_id)
    assert record is not None
    assert record.state is JobState.QUEUED
    seconds, _ = await frontend.redis.time()
    assert abs(record.submitted_ms - int(seconds) * 1000) < 60_000


async def skew_ms(steps: Steps) -> int:
    return int(await steps.redis.hget(steps.keys.pulse, "skew_ms") or 0)


async def roll_back_pulses(steps: Steps, kept: dict[bytes, bytes]) -> None:
    """Puts the hash back as it was, like a server that lost the end of its append-only file."""
    pipe = steps.redis.pipeline(transaction=True)
    pipe.delete(steps.keys.pulse)
    pipe.hset(steps.keys.pulse, mapping=kept)
    await pipe.execute()


async def set_clock(steps: Steps, clock: SettableClock, offset_s: float) -> None:
    """Returns when the server shows it."""
    clock.set(offset_s)

    async def is_shown() -> bool:
        seconds, _ = await steps.redis.time()
        return abs(int(seconds) - time.time() - offset_s) < 60

    await until(is_shown)


@BOTH_WAYS
async def test_a_step_is_known_though_the_server_lost_its_last_pulses(
    partition: Partition, clock: SettableClock, step_s: int
) -> None:
    steps = Steps(await partition.transport())
    job = await steps.submit(timeout_ms=600_000)
    await steps.store.reap()
    kept = await steps.redis.hgetall(steps.keys.pulse)
    for _ in range(5):
        await steps.store.reap()
    await roll_back_pulses(steps, kept)
    await set_clock(steps, clock, step_s)
    await steps.store.reap()
    assert abs(await skew_ms(steps) - step_s * 1000) < 2000
    assert await steps.redis.hget(steps.keys.pulse, "stands_ms") is None
    await steps.store.reap()
    assert await states(steps, [job.job_id]) == ["queued"]


@BOTH_WAYS
@pytest.mark.parametrize("is_rolled_back", [False, True])
async def test_a_step_counts_once_though_a_process_was_silent_since_before_it(
    partition: Partition, clock: SettableClock, step_s: int, is_rolled_back: bool
) -> None:
    """Of two steps it has seen the sum, and the first is known already."""
    silent, other = Steps(await partition.transport()), Steps(await partition.transport())
    job = await other.submit(timeout_ms=600_000)
    await other.store.reap()
    kept = await other.redis.hgetall(other.keys.pulse)
    for _ in range(5):
        await silent.store.reap()
    if is_rolled_back:
        await roll_back_pulses(other, kept)
    await set_clock(other, clock, step_s)
    await other.store.reap()
    for _ in range(10):
        await other.store.reap()  # numbers pass those of the lost pulses
    assert abs(await skew_ms(other) - step_s * 1000) < 2000
    await set_clock(other, clock, 2 * step_s)
    await silent.store.reap()
    assert await other.redis.hget(other.keys.pulse, "stands_ms") is not None
    await other.store.reap()
    assert abs(await skew_ms(other) - 2 * step_s * 1000) < 2000
    assert await states(other, [job.job_id]) == ["queued"]


async def test_a_process_started_after_the_clock_step_settles_nothing(
    partition: Partition, clock: SettableClock
) -> None:
    old, new = Steps(await partition.transport()), Steps(await partition.transport())
    job = await old.submit(timeout_ms=600_000)
    await old.store.reap()
    await set_clock(old, clock, HOUR_S)
    for _ in range(3):
        await new.store.reap()
    assert await states(old, [job.job_id]) == ["queued"]
    await old.store.reap()
    assert abs(await skew_ms(old) - HOUR_S * 1000) < 2000


async def test_a_silence_without_a_step_leaves_what_processes_know_of_before(
    partition: Partition, clock: SettableClock
) -> None:
    """A stall, then a loss with a step: the bases from before the stall are still good."""
    one, other = Steps(await partition.transport()), Steps(await partition.transport())
    job = await one.submit(timeout_ms=600_000)
    await one.store.reap()
    await other.store.reap()
    await asyncio.sleep(2.5)  # without a pulse
    await one.store.reap()
    assert await one.redis.hget(one.keys.pulse, "stands_ms") is None
    await set_clock(one, clock, HOUR_S)
    await other.store.reap()
    assert abs(await skew_ms(one) - HOUR_S * 1000) < 2000
    assert await states(one, [job.job_id]) == ["queued"]
