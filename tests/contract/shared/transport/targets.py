"""A server under comparison: the ports over it, what is stored in it, and whether that is bounded.

Times and stream ids are the server's own, so they are left out of everything that is compared.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest import mock

from penstock.launcher import redis_server as private_server
from penstock.launcher.redis_server import PrivateServer, Version, _candidates, server_version
from shared.keys import GROUP
from shared.messages import TERMINAL_STATES, JobState
from shared.redis.check import MIN_VERSION
from shared.redis.connections import forget_fake_server
from shared.redis.pubsub import Subscriber
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.job_queue import RedisJobQueue
from shared.transport.job_store import StorePolicy
from shared.transport.ports.job_search import JobFilter
from shared.transport.pulls import MAX_CRASHES
from shared.transport.scripts import Scripts
from tests.support.redis_server import KEYS_WITHOUT_TTL

MODELS = ("m", "org/n:1")
NAMESPACE = "walk"
FAR_MS = 100_000_000  # nothing ends by the clock during a walk
SHORT_MS = 1
RETAIN_MS = 3_600_000
POLICY = StorePolicy(
    grace_ms=FAR_MS, frontend_lease_ms=FAR_MS, record_ms=RETAIN_MS, text_ms=RETAIN_MS
)
SYNC = b"sync"

HASHES = frozenset(
    {"job", "w", "stat", "tenant", "workers", "models", "pulse", "dead", "work", "idem", "held"}
)
_TIMES = frozenset(
    {"orphan_ms", "qid", "entry", "epoch", "claims", "ends"}
)  # and every other name that ends in _ms
_PAIRED = 512  # entries of one pending list that are read


def real_servers() -> list[tuple[str, Version]]:
    """Path and version of every server on PATH and of the wheel's, each version once."""
    found: dict[Version, str] = {}
    for path in _candidates():
        version = server_version(path)
        if version is not None and version[:2] >= MIN_VERSION:
            found.setdefault(version, path)
    return [(path, version) for version, path in found.items()]


@contextlib.contextmanager
def private_server_of(path: str, version: Version) -> Iterator[str]:
    """The URL of an own server of this very binary."""
    server = PrivateServer()
    with mock.patch.object(private_server, "find_server_binary", return_value=(path, version)):
        url = server.start()
    try:
        yield url
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def open_target(name: str, url: str) -> AsyncIterator[Target]:
    transport = await open_transport(url, namespace=NAMESPACE, policy=POLICY)
    pubsub: Any = transport.connections.commands.pubsub()
    await pubsub.psubscribe(f"{NAMESPACE}:*")
    try:
        yield Target(name, transport, pubsub)
    finally:
        await pubsub.aclose()
        await transport.aclose()
        if transport.is_fake:
            forget_fake_server(url)


class Target:
    """One server, with a queue of its own for every worker, as in a process of its own."""

    def __init__(self, name: str, transport: RedisTransport, pubsub: Any) -> None:
        self.name = name
        self.keys = transport.keys
        self.store = transport.store
        self.registry = transport.registry
        self.search = transport.search
        self.redis: Any = transport.connections.commands
        self._transport = transport
        self._pubsub = pubsub
        self._queues: dict[str, RedisJobQueue] = {}
        self._written_newer: set[str] = set()  # jobs
        self._streams = [queue for model in MODELS for queue in self.keys.queues(model)]

    def models_of(self, worker: str) -> tuple[str, ...]:
        """Every third worker serves one model only."""
        number = int(worker[1:])
        return (MODELS[:1], MODELS, MODELS[::-1])[number % 3]

    def queue(self, worker: str) -> RedisJobQueue:
        if worker not in self._queues:
            connections = self._transport.connections
            # Every fourth worker finds that all jobs have waited long enough for others, every
            # second one that they have for the worker with their prefix.
            wait_ms = FAR_MS if int(worker[1:]) % 4 else 0
            affinity_ms = SHORT_MS if int(worker[1:]) % 2 else wait_ms
            self._queues[worker] = RedisJobQueue(
                self.keys,
                connections,
                Scripts(self.keys, RETAIN_MS),
                Subscriber(connections.new_pubsub),
                defer_ms=wait_ms,
                asking_ms=FAR_MS,
                affinity_ms=affinity_ms,
            )
            self._queues[worker].serve(self.models_of(worker))
        return self._queues[worker]

    async def lane_of(self, job_id: str) -> int:
        """The lane that the job was put into."""
        return int((await self.hash(job_id))["q"][-1])

    # --- what no port can bring about -------------------------------------------------------

    async def claim_late(self, worker: str, job_id: str) -> str:
        """As in a reconcile that has read the worker's pending list before all that was since."""
        fields = await self.hash(job_id)
        reply = await self.queue(worker)._call(
            "claim", worker, fields["q"], fields["qid"], job_id, MAX_CRASHES
        )
        return reply[0].decode()

    async def fall_silent(self) -> None:
        """As if nobody had spoken to the server for long."""
        await self.redis.hset(self.keys.pulse, "at_ms", 1)
        await self.redis.pexpire(self.keys.pulse, FAR_MS)

    async def forget_silence(self) -> None:
        """However long the last step took here, nobody was silent."""
        await self.redis.delete(self.keys.pulse)

    async def letters(self) -> list[str]:
        """Ids of the jobs that have a dead letter, oldest first."""
        found = await self._transport.dead_letters.list(None, 1000)
        return [letter.job_id for letter in found][::-1]

    async def drop_letter(self, job_id: str) -> bool:
        return await self._transport.dead_letters.drop(job_id)

    async def stretch_graces(self) -> None:
        """However long the next step takes here, no grace ends by the clock."""
        job_ids = [job_id.decode() for job_id in await self.redis.zrange(self.keys.live, 0, -1)]
        pipe = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hget(self.keys.job(job_id), "orphan_ms")
        dues = await pipe.execute()
        for job_id, due in zip(job_ids, dues, strict=True):
            if due is not None and int(due) > 1:
                pipe.hset(self.keys.job(job_id), "orphan_ms", 10**13)
        await pipe.execute()

    async def pass_deadline(self, job_id: str) -> bool:
        if not await self.set_if_live(job_id, "deadline_ms", 1):
            return False
        await self.redis.zadd(self.keys.live, {job_id: 1}, xx=True)
        return True

    async def pass_queue_deadline(self, job_id: str) -> bool:
        if "queue_deadline_ms" not in await self.hash(job_id):
            return False
        await self.redis.zadd(self.keys.queued_deadlines, {job_id: 1}, xx=True)
        return await self.set_if_live(job_id, "queue_deadline_ms", 1)

    async def write_as_newer(self, job_id: str) -> bool:
        self._written_newer.add(job_id)
        return await self.set_if_live(job_id, "v", 99)

    async def set_if_live(self, job_id: str, field: str, value: int) -> bool:
        state = (await self.hash(job_id)).get("state")
        if state is None or state in TERMINAL_STATES:
            return False
        await self.redis.hset(self.keys.job(job_id), field, value)
        return True

    async def lose_log_of_queued(self, job_id: str) -> bool:
        if (await self.hash(job_id)).get("state") != "queued":
            return False
        return bool(await self.redis.delete(self.keys.log(job_id)))

    async def expire(self, job_id: str) -> None:
        """As when its retention has passed."""
        state = (await self.hash(job_id))["state"]
        await self.redis.zrem(self.keys.ended(state), job_id)
        await self.redis.delete(self.keys.job(job_id), self.keys.log(job_id))

    # --- what is stored ---------------------------------------------------------------------

    async def hash(self, job_id: str) -> dict[str, str]:
        return _words(await self.redis.hgetall(self.keys.job(job_id)))

    async def jobs(self, job_ids: list[str]) -> Any:
        """Hash and log of each."""
        pipe = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hgetall(self.keys.job(job_id))
            pipe.xrange(self.keys.log(job_id))
        replies = await pipe.execute()
        hashes, logs = replies[::2], replies[1::2]
        return [_timeless(_words(fields)) for fields in hashes], [
            _timeless_log(log) for log in logs
        ]

    async def position(self, job_id: str) -> int | None:
        record = await self.store.get(job_id)
        return None if record is None else record.queue_position

    async def listed(self, state: JobState | None) -> Any:
        records = (await self.search.find(JobFilter(state), 1000)).records
        return sorted(
            (record.job_id, str(record.state), record.queue_position or 0) for record in records
        )

    async def everything(self) -> Any:
        """All of it, in words that can be compared."""
        prefix = self.keys.prefix
        found: dict[str, Any] = {}
        for key in await self._all_keys():
            kind = key.removeprefix(prefix).partition(":")[0]
            if kind in HASHES:
                found[key] = _timeless(_words(await self.redis.hgetall(key)))
            elif kind == "kept" and key != f"{prefix}kept":  # by times
                found[key] = sum(map(int, await self.redis.hvals(key)))
            elif kind == "tombstone":  # its times first
                found[key] = (await self.redis.get(key)).split(b"|")[2:]
            elif kind == "prefixes":
                found[key] = sorted(await self.redis.smembers(key))
            elif kind == "paused":
                found[key] = sorted(await self.redis.hkeys(key))
            elif kind in ("req", "prompt", "probe", "order", "f", "blob"):
                found[key] = await self.redis.get(key)
            elif kind in (
                "live",
                "unbegun",
                "queued",
                "running",
                "ended",
                "models_seen",
                "models_kept",
                "prompts",
                "kept",
            ):
                found[key] = sorted(await self.redis.zrange(key, 0, -1))
            elif kind in ("texts", "records"):
                found[key] = await self._listed(kind, key)
            elif kind in ("q", "dlq"):
                found[key] = [fields for _, fields in await self.redis.xrange(key)]
            else:
                assert kind == "log", key
                found[key] = _timeless_log(await self.redis.xrange(key))
        pending = {queue: await self._pending(queue) for queue in self._streams}
        return found, pending

    async def _listed(self, kind: str, key: str) -> list[bytes]:
        """What is listed and still there: which others are left depends on equal times."""
        is_all = key == f"{self.keys.prefix}{kind}"
        place = f"{kind}:" if is_all else {"texts": "log:", "records": "job:"}[kind]
        names = await self.redis.zrange(key, 0, -1)
        there = [await self.redis.exists(f"{self.keys.prefix}{place}{n.decode()}") for n in names]
        return sorted(name for name, is_there in zip(names, there, strict=True) if is_there)

    async def heard(self) -> list[tuple[bytes, bytes]]:
        """Everything that was published since the last call, in order."""
        channel = self.keys.channel("sync").encode()
        await self.redis.publish(channel, SYNC)
        frames: list[tuple[bytes, bytes]] = []
        while True:
            message = await self._pubsub.get_message(timeout=10.0)
            assert message is not None, "the subscription is silent"
            if message["type"] != "pmessage":
                continue
            if message["channel"] == channel:
                return frames
            frames.append((message["channel"], _FINISHED_MS.sub(rb"\1", message["data"])))

    async def lives_ms(self) -> dict[str, int]:
        keys = await self._all_keys()
        pipe = self.redis.pipeline(transaction=False)
        for key in keys:
            pipe.pttl(key)
        return dict(zip(keys, await pipe.execute(), strict=True))

    # --- what must hold ---------------------------------------------------------------------

    async def assert_bounded(self) -> None:
        """Every key expires but the documented ones; streams hold live jobs only."""
        allowed = {self.keys.prefix + name for name in KEYS_WITHOUT_TTL}
        immortal = [key for key, ms in (await self.lives_ms()).items() if ms < 0]
        assert not set(immortal) - allowed, f"{self.name}: without TTL: {immortal}"
        live = {job_id.decode() for job_id in await self.redis.zrange(self.keys.live, 0, -1)}
        never_claimed = await self.redis.zrange(self.keys.queued_deadlines, 0, -1)
        queued_deadlines = {job_id.decode() for job_id in never_claimed}
        bounded = set()
        for job_id in live:
            fields = await self.hash(job_id)
            if fields["attempt"] == "0" and "queue_deadline_ms" in fields:
                bounded.add(job_id)
        assert queued_deadlines == bounded, f"{self.name}: {queued_deadlines ^ bounded}"
        for queue in self._streams:
            entries = await self.redis.xrange(queue)
            queued = [fields[b"id"].decode() for _, fields in entries]
            assert len(set(queued)) == len(queued), f"{self.name}: twice in {queue}"
            assert set(queued) <= live, f"{self.name}: of an ended job in {queue}"
            await self._assert_one_owner(queue)
        for key in await self._all_keys():
            if key.startswith(self.keys.request("")):
                assert key.removeprefix(self.keys.request("")) in live, f"{self.name}: {key}"

    async def _assert_one_owner(self, queue: str) -> None:
        """A running job is in the pending list of its owner, whose death it would survive. One that
        a newer release wrote may be set aside for its workers."""
        holders = {job_id: consumer for consumer, job_id in await self._pending(queue) if job_id}
        for job_id, holder in holders.items():
            fields = await self.hash(job_id)
            is_aside = holder == "_released" and job_id in self._written_newer
            if fields.get("state") == "running" and not is_aside:
                assert fields["owner"] == holder, f"{self.name}: {job_id} is in {holder}'s list"

    async def assert_counters_true(self, job_ids: set[str], totals: Counter[str]) -> None:
        gauges: Counter[str] = Counter()
        tenants: dict[str, Counter[str]] = {}
        work: Counter[tuple[str, str]] = Counter()  # tokens by model and lane
        live = set()
        for job_id in job_ids:
            fields = await self.hash(job_id)
            state = fields["state"]
            if state in TERMINAL_STATES:
                continue
            live.add(job_id.encode())
            tenant = tenants.setdefault(fields["tenant"], Counter())
            tokens = 0
            if state == "queued":
                tokens = int(fields["prompt_tokens"])
                tenant[f"base{fields['lane']}"] += 1
                work[fields["model"], fields["q"][-1]] += int(fields["work"])
            for counter in (gauges, tenant):
                counter[state] += 1
                counter["queued_tokens"] += tokens
        stats = await self.registry.queue_stats()
        output = {"queued": stats.queued, "running": stats.running}
        output["queued_tokens"] = stats.queued_tokens
        assert Counter(output) == gauges, f"{self.name}: gauges"
        assert Counter(dict(stats.totals)) == totals, f"{self.name}: totals"
        assert set(await self.redis.zrange(self.keys.live, 0, -1)) == live, f"{self.name}: live"
        for tenant in "abc":
            stored = _words(await self.redis.hgetall(self.keys.tenant(tenant)))
            counted = Counter({name: int(stored[name]) for name in stored if "newest" not in name})
            assert counted == tenants.get(tenant, Counter()), f"{self.name}: tenant {tenant}"
            assert bool(stored) == (tenant in tenants), f"{self.name}: tenant {tenant} is kept"
        for model in MODELS:
            lanes = _words(await self.redis.hgetall(self.keys.work(model)))
            for lane in set(lanes) - {"output"}:
                assert int(lanes[lane]) == work[model, lane], f"{self.name}: work of {model}"

    async def assert_swept(self, workers: list[str]) -> None:
        """After the last job: no entries, no pending ones, no consumer of anybody who is gone."""
        names = {name.encode() for name in workers}
        assert set(await self.redis.hkeys(self.keys.workers)) == names, self.name
        assert not await self.redis.exists(self.keys.live, self.keys.queued_deadlines), self.name
        for queue in self._streams:
            if not await self.redis.exists(queue):
                continue
            assert await self.redis.xlen(queue) == 0, f"{self.name}: {queue}"
            # The stand-in's own count by consumer may be too high.
            left = await self.redis.xpending_range(queue, GROUP, "-", "+", 1)
            assert left == [], f"{self.name}: {queue}: {left}"
            for consumer in await self.redis.xinfo_consumers(queue, GROUP):
                assert consumer["name"] in names | {b"_released"}, f"{self.name}: {consumer}"
        probes = [key for key in await self._all_keys() if key.startswith(self.keys.probe(""))]
        assert not probes, f"{self.name}: {probes}"

    async def _all_keys(self) -> list[str]:
        """But for those of the history, whose names are times."""
        pattern = f"{NAMESPACE}:*"
        found = {key.decode() async for key in self.redis.scan_iter(pattern, count=1000)}
        return sorted(key for key in found if not key.startswith(self.keys.prefix + "history:"))

    async def _pending(self, queue: str) -> list[tuple[str, str]]:
        """Who holds which job."""
        if not await self.redis.exists(queue):
            return []
        ids = {entry: fields[b"id"].decode() for entry, fields in await self.redis.xrange(queue)}
        rows = await self.redis.xpending_range(queue, GROUP, "-", "+", _PAIRED)
        assert len(rows) < _PAIRED, queue
        return [(row["consumer"].decode(), ids.get(row["message_id"], "")) for row in rows]


def _words(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


# A finished job's last frame ends with the time.
_FINISHED_MS = re.compile(rb"^(E\|\d+\|finished\|.*\|)\d+$", re.DOTALL)


def _timeless_log(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Any:
    return [
        (at, {name: value for name, value in fields.items() if name != b"end_ms"})
        for at, fields in entries
    ]


def _timeless(fields: dict[str, str]) -> dict[str, str]:
    """Times are kept as present or not."""
    return {
        name: "" if name in _TIMES or name.endswith("_ms") else value
        for name, value in fields.items()
        if not name.startswith(("store_", "disk_"))  # the fake server has none of its own
    }
