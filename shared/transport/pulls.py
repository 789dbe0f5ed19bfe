"""Pulls: takes new jobs from the queues, and waits in the server until there are some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared.keys import NUM_LANES
from shared.redis.connections import BLOCK_MS, Connections
from shared.redis.pool import Command
from shared.transport.deliveries import DeliveryReader
from shared.transport.failures import group_is_missing, is_out_of_memory, translated
from shared.transport.ports.queue import Delivery
from shared.transport.scripts import Argument, Scripts

log = logging.getLogger(__name__)

MAX_CRASHES = 4  # the last two of them while it ran alone
POLL_S = 0.02
RETRY_S = 0.05
HELD_S = 0.25  # between looks at queues that an operator's order leaves out

# For how long `pull` defers jobs beyond its worker's portion to workers that pulled within the
# last ASKING_MS. A worker that waits for work pulls again after BLOCK_MS.
DEFER_MS = 50
ASKING_MS = BLOCK_MS + 500
AFFINITY_MS = 40
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


class Pulls:
    """Takes new jobs for a JobQueue, from the queues given to `serve`."""

    def __init__(
        self,
        connections: Connections,
        scripts: Scripts,
        reader: DeliveryReader,
        create_groups: Callable[[], Awaitable[None]],
        *,
        defer_ms: int,
        asking_ms: int,
        affinity_ms: int,
    ) -> None:
        """`create_groups` is called when a queue has no consumer group.

        `defer_ms`: for how long `pull` leaves jobs beyond its worker's portion to others (0: not
        at all); `asking_ms`: a worker is one of the others if its last pull is no older;
        `affinity_ms`: for how long `pull` leaves jobs to the worker that holds the longest part of
        their prefix (0: not at all).
        """
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts
        self._reader = reader
        self._create_groups = create_groups
        self._defer_ms = defer_ms
        self._asking_ms = asking_ms
        self._affinity_ms = affinity_ms
        self._queues: tuple[str, ...] = ()
        self._delivered: Sequence[bytes] = ()  # up to where nothing waits in these queues, if known

    def serve(self, queues: tuple[str, ...]) -> None:
        """Takes from these queues from now on: lane by lane, the first lane at the front."""
        self._queues = queues
        self._delivered = ()

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
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
        queues = self._queues[: lane * len(self._queues) // NUM_LANES]
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
                await self._create_groups()
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

    async def _call(self, name: str, *arguments: Argument) -> Any:
        return await self._scripts.call(self._connections.scripts, name, *arguments)


def _wait_for_entry(queues: Sequence[str], last: Sequence[bytes], left_s: float) -> Command:
    """Returns the command that waits in the server for an entry after `last` of each queue."""
    return ("XREAD", "COUNT", 1, "BLOCK", _block_ms(left_s), "STREAMS", *queues, *last)


def _block_ms(left_s: float) -> int:
    return max(1, min(BLOCK_MS, int(left_s * 1000)))


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
