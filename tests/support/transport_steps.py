"""Short words for what the contract tests do again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.messages import (
    START,
    FinishReason,
    Job,
    JobState,
    Usage,
)
from shared.redis.pubsub import Subscriber
from shared.transport.connect import RedisTransport
from shared.transport.job_queue import RedisJobQueue
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.job_search import JobFilter
from shared.transport.ports.jobs import RESYNC, JobRecord
from shared.transport.ports.queue import AppendResult, Delivery, JobEnd, WorkerReport
from shared.transport.scripts import Scripts
from tests.support.jobs import LIMITS, MODEL, Stream, accepted, make_job
from tests.support.polling import until

LEASE_MS = 20_000
FRONTEND_LEASE_MS = 600_000  # ends when a test says so
WAIT_S = 10.0
FINISHED = JobEnd(JobState.FINISHED, FinishReason.STOP, Usage(3, 0, 0))


class Steps:
    """A transport, driven by one test."""

    def __init__(self, transport: RedisTransport) -> None:
        self.transport = transport
        self.store = transport.store
        self.registry = transport.registry
        self.search = transport.search
        self.queue = transport.queue
        self.keys = transport.keys
        self.redis: Any = transport.connections.commands

    async def worker(self, worker_id: str, models: Sequence[str] = (MODEL,), **more: Any) -> str:
        await self.queue.setup(models)
        await self.heartbeat(worker_id, models=tuple(models), **more)
        return worker_id

    async def list_jobs(
        self, state: JobState | None, limit: int, tenant: str | None = None
    ) -> Sequence[JobRecord]:
        return (await self.search.find(JobFilter(state, tenant), limit)).records

    async def heartbeat(
        self,
        worker_id: str,
        running: Sequence[tuple[str, int]] = (),
        models: tuple[str, ...] = (MODEL,),
        lease_ms: int = LEASE_MS,
        **more: Any,
    ) -> Sequence[str]:
        stats = more.pop("stats", {"step": 1})
        reply = await self.queue.heartbeat(
            WorkerReport(worker_id, lease_ms, models, stats, running, **more)
        )
        return [*reply.dropped, *reply.lost]

    async def submit(self, frontend: str = "", limits: AdmissionLimits = LIMITS, **job: Any) -> Job:
        made = make_job(**job)
        await accepted(self.store, made, frontend, limits)
        if frontend:
            await self.store.frontend_heartbeat(frontend.partition("#")[0], FRONTEND_LEASE_MS)
        return made

    async def pull(self, worker_id: str, count: int = 8) -> Sequence[Delivery]:
        return await self.queue.pull(worker_id, count, 0)

    async def running(self, worker_id: str = "w1", **job: Any) -> Delivery:
        """One job, submitted and claimed by the worker."""
        await self.worker(worker_id)
        made = await self.submit(**job)
        (delivery,) = await self.pull(worker_id)
        assert delivery.job == made
        return delivery

    async def attach(self, job_id: str, reader_id: str) -> JobState | None:
        (state,) = await self.store.attach([(job_id, reader_id)])
        return state

    async def lose_frontend(self, frontend_id: str) -> None:
        """As when its lease has run out."""
        await self.redis.delete(self.keys.frontend(frontend_id))
        await self.redis.delete(self.keys.pulse)

    async def die(self, worker_id: str) -> None:
        await self.queue.declare_dead(worker_id)
        # However slow this machine is, its silence is not taken for an outage of the server.
        await self.redis.delete(self.keys.pulse)

    async def say(
        self,
        worker_id: str,
        stream: Stream,
        token_ids: Sequence[int],
        text: str,
        **more: Any,
    ) -> AppendResult:
        """Appends and, when accepted, moves the stream on."""
        item = stream.append(token_ids, text, **more)
        (result,) = await self.queue.append(worker_id, LEASE_MS, [item])
        if result.status == "ok":
            stream.accept(item)
        return result

    async def record(self, job_id: str) -> JobRecord:
        """Of a job that the store must have."""
        record = await self.store.get(job_id)
        assert record is not None
        return record

    async def hash(self, job_id: str) -> dict[str, str]:
        fields = await self.redis.hgetall(self.keys.job(job_id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def deadline_passed(self, job_id: str, name: str = "deadline_ms") -> None:
        """Returns once the server's clock is past the job's deadline, or that of this name."""
        deadline_ms = int((await self.hash(job_id))[name])

        async def passed() -> bool:
            seconds, microseconds = await self.redis.time()
            return int(seconds) * 1000 + int(microseconds) // 1000 > deadline_ms

        await until(passed)

    async def assert_counters_true(self) -> None:
        """Gauges equal what the hashes say."""
        queued = running = tokens = 0
        async for key in self.redis.scan_iter(match=self.keys.job("*"), count=1000):
            state, prompt = await self.redis.hmget(key, "state", "prompt_tokens")
            queued += state == b"queued"
            running += state == b"running"
            tokens += int(prompt) if state == b"queued" else 0
        stats = await self.registry.queue_stats()
        assert (stats.queued, stats.running, stats.queued_tokens) == (queued, running, tokens)
        assert await self.redis.zcard(self.keys.live) == queued + running
        await self.assert_indexes_true()

    async def assert_indexes_true(self) -> None:
        """Each index lists what the hashes say, and nothing else.

        Jobs whose hashes have vanished may stay listed until the index expires: who reads it leaves
        them out.
        """
        expected: dict[str, set[bytes]] = {}
        prefix = self.keys.job("")
        async for key in self.redis.scan_iter(match=prefix + "*", count=1000):
            job_id = key.decode().removeprefix(prefix).encode()
            state, tenant, model = (
                value.decode() for value in await self.redis.hmget(key, "state", "tenant", "model")
            )
            if state in ("queued", "running"):
                indexes = [self.keys.listed(state), self.keys.listed(state, tenant)]
                if state == "queued":
                    indexes.append(self.keys.queued_for(model))
                for index in indexes:
                    expected.setdefault(index, set()).add(job_id)
        found: dict[str, set[bytes]] = {}
        for state in ("queued", "running"):
            async for key in self.redis.scan_iter(match=self.keys.listed(state) + "*", count=1000):
                for job_id in await self.redis.zrange(key, 0, -1):
                    if await self.redis.exists(prefix + job_id.decode()):
                        found.setdefault(key.decode(), set()).add(job_id)
        assert found == expected


def other_process(transport: RedisTransport, **timing: int) -> Steps:
    """The same server as another worker process sees it: with a memory of its own.

    `timing`: `defer_ms`, `asking_ms` of RedisJobQueue.
    """
    steps = Steps(transport)
    connections = transport.connections
    steps.queue = RedisJobQueue(
        transport.keys,
        connections,
        Scripts(transport.keys, 600_000),
        Subscriber(connections.new_pubsub),
        **timing,
    )
    return steps


async def whole_log(steps: Steps, job_id: str) -> list[Any]:
    return list(await steps.store.read_log(job_id, START, 4096))


async def assert_a_channel_left_is_heard_again(steps: Steps) -> None:
    """A channel that is left and subscribed to at once is confirmed and heard, and no other
    subscription notices."""
    bus = steps.transport.bus
    stream = Stream(await steps.running())
    other = await bus.subscribe("0-other")
    num_reconnects = bus.reconnects
    for _ in range(3):  # as requests of one idempotency key that are refused
        await bus.unsubscribe(await bus.begin(stream.job_id))
    subscription = await bus.subscribe(stream.job_id)
    assert await subscription.get(WAIT_S) is RESYNC
    await steps.say("w1", stream, [5], "a")
    assert [await subscription.get(WAIT_S)] == await whole_log(steps, stream.job_id)
    assert bus.reconnects == num_reconnects
    assert await other.get(WAIT_S) is RESYNC
    assert await other.get(0.2) is None, "nobody else has noticed"
    await bus.unsubscribe(subscription)
    await bus.unsubscribe(other)


async def calls_of(steps: Steps) -> dict[str, int]:
    """How often the server has run each command, scripts' commands among them."""
    stats = await steps.redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()}
