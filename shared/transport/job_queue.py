"""JobQueue over Redis: streams with a consumer group, one for each lane of each model."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from shared.keys import GROUP, NUM_LANES, Keys
from shared.redis.connections import Connections
from shared.redis.pubsub import Subscriber
from shared.transport.appends import append_arguments, append_result
from shared.transport.deliveries import DeliveryReader
from shared.transport.deployment import account_arguments
from shared.transport.failures import group_is_missing, is_out_of_memory, translated
from shared.transport.ports.jobs import Restored, TransportError
from shared.transport.ports.queue import (
    Append,
    AppendResult,
    AppendStatus,
    CrashCause,
    Delivery,
    HeartbeatReply,
    JobSnapshot,
    WorkerReport,
)
from shared.transport.ports.registry import CARD_LIFE_MS, RESERVED_STATS, Order
from shared.transport.pulls import AFFINITY_MS, ASKING_MS, DEFER_MS, MAX_CRASHES, Pulls
from shared.transport.scripts import Argument, Scripts

BLOB_LIFE_MS = CARD_LIFE_MS + 60_000  # a reader of a card finds its blobs
MAX_ANNOUNCEMENTS = 3  # the blobs are stored after the first one
PENDING_PAGE = 100
FROM_THE_FRONT = ("", "", "")
MAX_HINTS = 1024


class RedisJobQueue:
    """Implements JobQueue for the models given to `setup`."""

    def __init__(
        self,
        keys: Keys,
        connections: Connections,
        scripts: Scripts,
        subscriber: Subscriber,
        *,
        defer_ms: int = DEFER_MS,
        asking_ms: int = ASKING_MS,
        affinity_ms: int = AFFINITY_MS,
    ) -> None:
        """`defer_ms`, `asking_ms`, `affinity_ms`: see Pulls."""
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts
        self._subscriber = subscriber
        self._reader = DeliveryReader(keys, connections, scripts)
        self.pulls = Pulls(
            connections,
            scripts,
            self._reader,
            self._create_groups,
            defer_ms=defer_ms,
            asking_ms=asking_ms,
            affinity_ms=affinity_ms,
        )
        self._models: tuple[str, ...] = ()
        self._queues: tuple[str, ...] = ()  # lane by lane, the first lane at the front
        self._recover_from: Sequence[Argument] = FROM_THE_FRONT  # where the last call stopped

    def is_away(self, job_id: str) -> bool:
        return False  # there are no others

    async def setup(self, models: Sequence[str]) -> None:
        self.serve(models)
        with translated("setup"):
            pipe = self._redis.pipeline(transaction=False)
            for queue in self._queues:
                pipe.xgroup_create(queue, GROUP, id="0", mkstream=True)
                pipe.pexpire(queue, CARD_LIFE_MS, nx=True)
                pipe.pexpire(queue, CARD_LIFE_MS, gt=True)
            for reply in await pipe.execute(raise_on_error=False):
                if isinstance(reply, Exception) and "BUSYGROUP" not in str(reply):
                    raise reply

    async def _create_groups(self) -> None:
        await self.setup(self._models)

    def serve(self, models: Sequence[str]) -> None:
        """Takes from the queues of these models, too: the next pull creates missing ones."""
        self._models = tuple(dict.fromkeys((*self._models, *models)))
        lanes = zip(*map(self._keys.queues, self._models), strict=True)
        self._queues = tuple(queue for lane in lanes for queue in lane)
        self.pulls.serve(self._queues)

    async def heartbeat(self, report: WorkerReport) -> HeartbeatReply:
        stats = {name: _field(value) for name, value in report.stats.items()}
        if reserved := RESERVED_STATS.intersection(stats):
            raise ValueError(f"not names of statistics: {sorted(reserved)}")
        stats |= {"draining": _field(report.draining), "stalled": _field(report.stalled)}
        stats |= report.files._asdict() | {"order": report.order.value}
        clock = self._connections.clock
        begun_s = clock.now_s()
        arguments: list[Argument] = [
            report.worker_id,
            report.lease_ms,
            json.dumps(report.models),
            clock.testimony,
            *account_arguments(report.spent),
            len(stats),
        ]
        for name, value in stats.items():
            arguments += (name, value)
        for job_id, attempt in report.running:
            arguments += (job_id, attempt)
        with translated("heartbeat"):
            seen, *reply, order, num_workers, num_prefixes = await self._scripts.call(
                self._connections.heartbeat, "heartbeat", *arguments
            )
        clock.answered(begun_s, seen)
        dropped, lost, taken = ([job_id.decode() for job_id in job_ids] for job_ids in reply)
        return HeartbeatReply(dropped, lost, taken, _order(order), num_workers, num_prefixes)

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        return await self.pulls.pull(worker_id, count, block_ms) if count > 0 else []

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        return await self.pulls.oversubscribe(worker_id, count, leave_out)

    async def overtake(
        self, worker_id: str, count: int, lane: int, block_ms: int
    ) -> Sequence[Delivery]:
        return await self.pulls.overtake(worker_id, count, lane, block_ms)

    async def note_prefixes(
        self,
        worker_id: str,
        lease_ms: int,
        held: Sequence[bytes],
        lost: Sequence[bytes],
        *,
        is_first: bool,
    ) -> int | None:
        words = (worker_id, lease_ms, int(is_first), b"".join(held), b"".join(lost))
        with translated("note_prefixes"):
            try:
                num_noted: int = await self._call("prefixes", *words)
            except ResponseError as error:
                if is_out_of_memory(error):
                    return None
                raise
        return num_noted

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        claims: list[Any] = []
        with translated("reconcile"):
            # Without a lease nothing could be claimed, and the read alone would create the
            # consumer again after its removal.
            if not await self._redis.exists(self._keys.worker(worker_id)):
                return []
            for queue in self._queues:
                after = "0"
                while rows := await self._pending(queue, worker_id, after):
                    after = rows[-1][0].decode()
                    for entry, fields in rows:
                        claim = await self._claim_pending(queue, worker_id, entry, fields, known)
                        if claim is not None:
                            claims.append(claim)
                    if len(rows) < PENDING_PAGE:
                        break
            return await self._reader.deliveries(worker_id, claims)

    async def recover(
        self, worker_id: str, count: int, *, suspects: bool = True, before: int = NUM_LANES
    ) -> Sequence[Delivery]:
        if count < 1:
            return []
        with translated("recover"):
            try:
                arguments = (worker_id, count, MAX_CRASHES, int(suspects), before)
                claims, stopped = await self._call(
                    "recover", *arguments, *self._recover_from, *self._queues
                )
            except ResponseError as error:
                if not group_is_missing(error):
                    raise
                await self.setup(self._models)
                return []
            self._recover_from = stopped or FROM_THE_FRONT
            return await self._reader.deliveries(worker_id, claims)

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        faults = [item.fault() for item in items]
        sound = [at for at, fault in enumerate(faults) if fault is None]
        arguments: list[Argument] = []
        for at in sound:
            arguments += append_arguments(items[at])
        with translated("append"):
            verdicts = await self._call("append", worker_id, lease_ms, *arguments)
        results = [AppendResult(AppendStatus.REJECTED, detail=fault or "") for fault in faults]
        for at, verdict in zip(sound, verdicts, strict=True):
            results[at] = append_result(items[at], verdict.decode())
        return results

    async def restore(
        self, worker_id: str, job_id: str, attempt: int, snapshot: JobSnapshot, sure_ms: int
    ) -> Restored:
        left_ms = _left_ms(snapshot, self._connections.clock.now_s())
        arguments: tuple[Argument, ...] = (worker_id, job_id, attempt, sure_ms, left_ms)
        stored = (snapshot.request, snapshot.request_record, *snapshot.fields)
        with translated("restore"):
            try:
                word = await self._call("restore", *arguments, *stored)
            except ResponseError as error:
                if is_out_of_memory(error):
                    return Restored.NO_MEMORY
                raise
        return Restored(word.decode())

    async def release(
        self, worker_id: str, job_id: str, attempt: int, num_lane_preemptions: int = 0
    ) -> bool:
        with translated("release"):
            reply = await self._call("release", job_id, worker_id, attempt, num_lane_preemptions)
        return bool(reply[0] == b"OK")

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        arguments: list[Argument] = [worker_id, MAX_CRASHES, cause.value]
        for job_id, attempt in jobs:
            arguments += (job_id, attempt)
        with translated("crashed"):
            await self._call("crashed", *arguments)

    async def retire(self, worker_id: str, *, returns: bool = False) -> None:
        with translated("retire"):
            await self._call("retire", worker_id, int(returns), *self._queues)

    async def declare_dead(self, worker_id: str) -> None:
        """Ends the lease of a worker whose process has died: its jobs may be recovered at once."""
        with translated("declare_dead"):
            await self._redis.delete(self._keys.worker(worker_id))

    async def cancellations(self, worker_id: str) -> AsyncIterator[str]:
        hints = _Hints()
        channel = self._keys.control(worker_id)
        await self._subscriber.add(channel, hints)
        try:
            while True:
                yield await hints.get()
        finally:
            await self._subscriber.remove(channel, hints)

    async def announce(self, model: str, card: bytes, blobs: Mapping[str, bytes]) -> None:
        queues = self._keys.queues(model)
        with translated("announce"):
            lives = (CARD_LIFE_MS, BLOB_LIFE_MS)
            for _ in range(MAX_ANNOUNCEMENTS):
                missing = await self._call(
                    "announce", model, card, *lives, len(queues), *queues, *blobs
                )
                if not missing:
                    return
                for digest in missing:
                    name = digest.decode()
                    await self._redis.set(self._keys.blob(name), blobs[name], px=BLOB_LIFE_MS)
        raise TransportError(f"Redis does not keep the text files of {model}")

    async def _pending(
        self, queue: str, worker_id: str, after: str
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply: Any
        try:
            reply = await self._redis.xreadgroup(
                GROUP, worker_id, {queue: after}, count=PENDING_PAGE
            )
        except ResponseError as error:
            if not group_is_missing(error):
                raise
            await self.setup(self._models)
            return []
        return reply[0][1] if reply else []

    async def _claim_pending(
        self,
        queue: str,
        worker_id: str,
        entry: bytes,
        fields: dict[bytes, bytes],
        known: frozenset[str],
    ) -> Any | None:
        job_id = fields.get(b"id", b"").decode() if fields else ""
        if not job_id:  # the entry was deleted
            await self._redis.xack(queue, GROUP, entry)
            return None
        if job_id in known:
            return None
        reply = await self._call("claim", worker_id, queue, entry, job_id, MAX_CRASHES)
        return reply if reply[0] == b"OK" else None

    async def _call(self, name: str, *arguments: Argument) -> Any:
        return await self._scripts.call(self._connections.scripts, name, *arguments)


def _left_ms(snapshot: JobSnapshot, now_s: float) -> int:
    """Returns the milliseconds left of a claimed job's timeout at `now_s`, at least 0."""
    fields = dict(zip(snapshot.fields[::2], snapshot.fields[1::2], strict=True))
    at_claim_ms = int(fields[b"deadline_ms"]) - int(fields[b"claim_ms"])
    return max(0, at_claim_ms - int((now_s - snapshot.claimed_s) * 1000))


def _order(word: bytes) -> Order | None:
    """Returns None without an order, or for one of a newer release."""
    try:
        return Order(word.decode())
    except ValueError:
        return None


class _Hints:
    """Job ids from the control channel; the oldest are dropped when they are not read."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque(maxlen=MAX_HINTS)
        self._wake = asyncio.Event()

    async def get(self) -> str:
        while not self._ids:
            self._wake.clear()
            await self._wake.wait()
        return self._ids.popleft()

    def on_confirmed(self) -> None:
        """Hints may be lost: append and heartbeat report the same."""

    def on_message(self, data: bytes) -> None:
        self._ids.append(data.decode(errors="replace"))
        self._wake.set()


def _field(value: float | str) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
