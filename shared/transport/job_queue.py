"""JobQueue over Redis: streams with a consumer group, one for each lane of each model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared.keys import GROUP, NUM_LANES, Keys
from shared.redis.connections import BLOCK_MS, Connections
from shared.redis.pool import Command
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
from shared.transport.scripts import Argument, Scripts

log = logging.getLogger(__name__)

BLOB_LIFE_MS = CARD_LIFE_MS + 60_000  # a reader of a card finds its blobs
MAX_ANNOUNCEMENTS = 3  # the blobs are stored after the first one
MAX_CRASHES = 4  # the last two of them while it ran alone
PENDING_PAGE = 100
POLL_S = 0.02
RETRY_S = 0.05
HELD_S = 0.25  # between looks at queues that an operator's order leaves out
MAX_HINTS = 1024

# For how long `pull` defers jobs beyond its worker's portion to workers that pulled within the
# last ASKING_MS. A worker that waits for work pulls again after BLOCK_MS.
DEFER_MS = 50
ASKING_MS = BLOCK_MS + 500
AFFINITY_MS = 100
LATE_MS = 2  # after the end of a wait, by this process's clock, it has ended by the server's too


class Held(IntEnum):
    """Which queues an operator's order leaves out for a worker."""

    NONE = 0
    SOME = 1
    ALL = 2


class _Pulled(NamedTuple):
    """The reply to one `pull`."""

    claims: Sequence[Any] = ()
    more: bool = False  # there may be more to take at once
    # The newest entry of each queue, if the worker should wait for later entries.
    last: Sequence[bytes] = ()
    deferred_ms: int = 0  # until jobs left to other workers may be taken; 0 without any
    left_ms: int = 0  # likewise, of jobs left to workers that hold their prefixes
    held: Held = Held.NONE


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
        """`defer_ms`: for how long `pull` leaves jobs beyond its worker's portion to others (0: not
        at all); `asking_ms`: a worker is one of the others if its last pull is no older;
        `affinity_ms`: for how long `pull` leaves jobs to the worker that holds the longest part of
        their prefix (0: not at all)."""
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts
        self._subscriber = subscriber
        self._defer_ms = defer_ms
        self._asking_ms = asking_ms
        self._affinity_ms = affinity_ms
        self._reader = DeliveryReader(keys, connections, scripts)
        self._models: tuple[str, ...] = ()
        self._queues: tuple[str, ...] = ()  # lane by lane, the first lane at the front
        self._delivered: Sequence[bytes] = ()  # up to where nothing waits in these queues, if known

    async def setup(self, models: Sequence[str]) -> None:
        self._serve((*self._models, *models))
        with translated("setup"):
            pipe = self._redis.pipeline(transaction=False)
            for queue in self._queues:
                pipe.xgroup_create(queue, GROUP, id="0", mkstream=True)
                pipe.pexpire(queue, CARD_LIFE_MS, nx=True)
                pipe.pexpire(queue, CARD_LIFE_MS, gt=True)
            for reply in await pipe.execute(raise_on_error=False):
                if isinstance(reply, Exception) and "BUSYGROUP" not in str(reply):
                    raise reply

    def _serve(self, models: Sequence[str]) -> None:
        self._models = tuple(dict.fromkeys(models))
        lanes = zip(*map(self._keys.queues, self._models), strict=True)
        self._queues = tuple(queue for lane in lanes for queue in lane)
        self._delivered = ()

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
        if count < 1:
            return []
        deadline = time.monotonic() + block_ms / 1000
        with translated("pull"):
            pulled = _Pulled(last=self._delivered)
            if not pulled.last or block_ms <= 0:
                pulled = await self._pull_once(worker_id, count)
            while True:
                deliveries = await self._reader.deliveries(worker_id, pulled.claims)
                left_s = deadline - time.monotonic()
                if deliveries or left_s <= 0:
                    return deliveries
                if pulled.claims or pulled.more:
                    pulled = await self._pull_once(worker_id, count)
                    continue
                if pulled.held is not Held.NONE:  # no entry comes when they are opened again
                    left_s = min(HELD_S, left_s)
                if pulled.deferred_ms:  # until then this portion may grow, as others end jobs
                    left_s = min(POLL_S, left_s)
                if pulled.held is Held.ALL:
                    await asyncio.sleep(left_s)
                    pulled = await self._pull_once(worker_id, count)
                else:
                    pulled = await self._wait_and_pull(worker_id, count, pulled, left_s)

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

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        tenants: tuple[Argument, ...] = (len(leave_out), *leave_out)
        with translated("oversubscribe"):
            common = (worker_id, count, MAX_CRASHES, 0, 0)
            more = await self._take_more(*common, *tenants, *self._queues)
            return await self._reader.deliveries(worker_id, more.claims)

    async def overtake(
        self, worker_id: str, count: int, lane: int, block_ms: int
    ) -> Sequence[Delivery]:
        queues = self._queues[: lane * len(self._models)]
        # A job that is left to the worker with its prefix preempts no other meanwhile.
        left_ms = max(self._defer_ms, self._affinity_ms)
        common = (worker_id, count, MAX_CRASHES, left_ms, self._asking_ms)
        deadline = time.monotonic() + block_ms / 1000
        with translated("overtake"):
            more = await self._take_more(*common, 0, *queues)
            while True:
                deliveries = await self._reader.deliveries(worker_id, more.claims)
                left_s = deadline - time.monotonic()
                if deliveries or left_s <= 0:
                    return deliveries
                wait = None
                if more.deferred_ms or self._connections.is_fake:
                    await asyncio.sleep(min(POLL_S, left_s))
                elif not more.last:
                    await asyncio.sleep(min(RETRY_S, left_s))
                else:
                    wait = _wait_for_entry(queues, more.last, left_s)
                more = await self._take_more(*common, 0, *queues, wait=wait)

    async def _take_more(self, *arguments: Argument, wait: Command | None = None) -> _Pulled:
        """Returns the reply to `oversubscribe`, sent together with `wait` as in `_wait_and_pull`;
        an empty one without a group, which `pull` creates, and on a full server."""
        try:
            if wait is None:
                reply = await self._call("oversubscribe", *arguments)
            else:
                command = self._scripts.command("oversubscribe", *arguments)
                waited, reply = await self._connections.blocking.exchange(wait, command)
                if isinstance(reply, NoScriptError):
                    reply = await self._call("oversubscribe", *arguments)
                for failed in (reply, waited):
                    if isinstance(failed, ResponseError):
                        raise failed
        except ResponseError as error:
            if group_is_missing(error) or is_out_of_memory(error):
                return _Pulled()
            raise
        claims, deferred_ms, last = reply
        return _Pulled(claims, False, last, deferred_ms)

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
                claims = await self._call("recover", *arguments, *self._queues)
            except ResponseError as error:
                if not group_is_missing(error):
                    raise
                await self.setup(self._models)
                return []
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

    async def retire(self, worker_id: str) -> None:
        with translated("retire"):
            await self._call("retire", worker_id, *self._queues)

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

    async def _pull_once(self, worker_id: str, count: int) -> _Pulled:
        try:
            reply = await self._call("pull", *self._pull_arguments(worker_id, count))
        except ResponseError as error:
            reply = error
        return await self._pulled(reply)

    async def _wait_and_pull(
        self, worker_id: str, count: int, before: _Pulled, left_s: float
    ) -> _Pulled:
        """Pulls once something is queued after `before.last`, a part of `left_s` has passed, or
        jobs that were left to other workers may be taken.

        Both commands are sent at once: no round trip lies between the wait and the pull.
        """
        last = before.last
        is_due = bool(before.deferred_ms or before.left_ms)
        for due_ms in filter(None, (before.deferred_ms, before.left_ms)):
            left_s = min(left_s, due_ms / 1000)
        if not last:
            await asyncio.sleep(min(RETRY_S, left_s))
            return await self._pull_once(worker_id, count)
        if self._connections.is_fake:
            await asyncio.sleep(min(POLL_S, left_s))
            return await self._pull_once(worker_id, count)
        wait = _wait_for_entry(self._queues, last, left_s)
        pull = self._scripts.command("pull", *self._pull_arguments(worker_id, count))
        async with _ending(self._redis, _block_ms(left_s) if is_due else None):
            waited, reply = await self._connections.blocking.exchange(wait, pull)
        if isinstance(reply, NoScriptError):
            return await self._pull_once(worker_id, count)
        pulled = await self._pulled(reply)
        if isinstance(waited, ResponseError) and not (pulled.claims or pulled.more):
            raise waited  # else the loop would not wait at all
        return pulled

    def _pull_arguments(self, worker_id: str, count: int) -> tuple[Argument, ...]:
        waits_ms = (self._defer_ms, self._asking_ms, self._affinity_ms)
        return (worker_id, count, MAX_CRASHES, *waits_ms, *self._queues)

    async def _pulled(self, reply: Any) -> _Pulled:
        """Decodes a pull's reply, or the error in its place. Raises ResponseError."""
        if isinstance(reply, ResponseError):
            if group_is_missing(reply):
                await self.setup(self._models)
                await asyncio.sleep(RETRY_S)
                return _Pulled(more=True)
            if is_out_of_memory(reply):
                log.warning("Redis is out of memory (maxmemory): taking no new jobs")
                return _Pulled()
            raise reply
        if reply[0] == b"NOLEASE":
            return _Pulled()
        _, claims, more, last, deferred_ms, left_ms, held = reply
        self._delivered = () if deferred_ms or left_ms or held else last
        return _Pulled(claims, bool(more), last, deferred_ms, left_ms, Held(held))

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


def _wait_for_entry(queues: Sequence[str], last: Sequence[bytes], left_s: float) -> Command:
    """Returns the command that waits in the server for an entry after `last` of each queue."""
    return ("XREAD", "COUNT", 1, "BLOCK", _block_ms(left_s), "STREAMS", *queues, *last)


def _block_ms(left_s: float) -> int:
    return max(1, min(BLOCK_MS, int(left_s * 1000)))


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


@contextlib.asynccontextmanager
async def _ending(redis: Redis, block_ms: int | None) -> AsyncIterator[None]:
    """Makes the server end a wait of `block_ms` in time; None: there is no hurry.

    An idle server looks at its blocked clients only ten times a second, and whenever it has
    answered a command.
    """
    if block_ms is None:
        yield
        return

    async def ping() -> None:
        with contextlib.suppress(RedisError):  # the wait ends all the same, later
            await redis.ping()

    pings: list[asyncio.Task[None]] = []
    due = asyncio.get_running_loop().call_later(
        (block_ms + LATE_MS) / 1000, lambda: pings.append(asyncio.create_task(ping()))
    )
    try:
        yield
    finally:
        due.cancel()
        if pings:
            await asyncio.wait(pings)


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
