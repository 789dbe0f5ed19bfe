"""Pulls: takes new jobs from the queues, and waits in the server until there are some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
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


class Pulled(NamedTuple):
    """The reply to one pull."""

    claims: Sequence[Any] = ()
    more: bool = False  # there may be more to take at once
    # The newest entry of each queue, if the worker should wait for later entries.
    last: Sequence[bytes] = ()
    deferred_ms: int = 0  # until jobs left to other workers may be taken; 0 without any
    left_ms: int = 0  # likewise, of jobs left to workers that hold their prefixes
    held: Held = Held.NONE
    queues: Sequence[str] = ()  # in the order of `last`


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
            pulled = Pulled(last=self._delivered, queues=self._queues)
            if not pulled.last or block_ms <= 0:
                pulled = await self._pull_once(worker_id, count)
            while True:
                deliveries = await self._reader.deliveries(worker_id, pulled.claims)
                left_s = deadline - time.monotonic()
                if deliveries or left_s <= 0:
                    return deliveries
                if pulled.claims or pulled.more:
                    pulled = await self._pull_once(worker_id, count)
                else:
                    pulled = await self._wait_and_pull(worker_id, count, pulled, left_s)

    async def take(self, worker_id: str, count: int) -> tuple[Sequence[Delivery], Pulled]:
        """Pulls without waiting; returns with the deliveries the reply, which `wait` needs."""
        with translated("pull"):
            pulled = await self._pull_once(worker_id, count)
            return await self._reader.deliveries(worker_id, pulled.claims), pulled

    async def wait(self, pulled: Pulled, left_s: float) -> None:
        """Returns when another `take` (or `take_ahead`) may find something, and after `left_s` at
        the latest. Claims nothing: any number of queues may be waited for at once."""
        if pulled.claims or pulled.more:
            return
        with translated("wait"):
            left_s, wait = self._rest_of(pulled, left_s)
            if wait is None:
                await asyncio.sleep(left_s)
                return
            async with self._ending(pulled, left_s):
                (waited,) = await self._connections.blocking.exchange(wait)
            if isinstance(waited, ResponseError) and not group_is_missing(waited):
                raise waited

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
        deadline = time.monotonic() + block_ms / 1000
        with translated("overtake"):
            queues, common = self._ahead_of(worker_id, count, lane)
            more = await self._take_more(*common, *queues)
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
                more = await self._take_more(*common, *queues, wait=wait)

    async def take_ahead(
        self, worker_id: str, count: int, lane: int
    ) -> tuple[Sequence[Delivery], Pulled]:
        """Overtakes without waiting; returns as `take`."""
        with translated("overtake"):
            queues, common = self._ahead_of(worker_id, count, lane)
            more = (await self._take_more(*common, *queues))._replace(queues=queues)
            return await self._reader.deliveries(worker_id, more.claims), more

    def _ahead_of(
        self, worker_id: str, count: int, lane: int
    ) -> tuple[Sequence[str], Sequence[Argument]]:
        """Returns the queues of the lanes before `lane`, and the other arguments of an overtake."""
        # A job that is left to the worker with its prefix preempts no other meanwhile.
        left_ms = max(self._defer_ms, self._affinity_ms)
        queues = self._queues[: lane * len(self._queues) // NUM_LANES]
        return queues, (worker_id, count, MAX_CRASHES, left_ms, self._asking_ms, 0)

    async def _take_more(self, *arguments: Argument, wait: Command | None = None) -> Pulled:
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
                return Pulled()
            raise
        claims, deferred_ms, last = reply
        return Pulled(claims, False, last, deferred_ms)

    async def _pull_once(self, worker_id: str, count: int) -> Pulled:
        try:
            reply = await self._call("pull", *self._pull_arguments(worker_id, count))
        except ResponseError as error:
            reply = error
        return await self._pulled(reply)

    async def _wait_and_pull(
        self, worker_id: str, count: int, before: Pulled, left_s: float
    ) -> Pulled:
        """Pulls once something is queued after `before.last`, a part of `left_s` has passed, or
        jobs that were left to other workers may be taken.

        Both commands are sent at once: no round trip lies between the wait and the pull.
        """
        left_s, wait = self._rest_of(before, left_s)
        if wait is None:
            await asyncio.sleep(left_s)
            return await self._pull_once(worker_id, count)
        pull = self._scripts.command("pull", *self._pull_arguments(worker_id, count))
        async with self._ending(before, left_s):
            waited, reply = await self._connections.blocking.exchange(wait, pull)
        if isinstance(reply, NoScriptError):
            return await self._pull_once(worker_id, count)
        pulled = await self._pulled(reply)
        if isinstance(waited, ResponseError) and not (pulled.claims or pulled.more):
            raise waited  # else the loop would not wait at all
        return pulled

    def _rest_of(self, before: Pulled, left_s: float) -> tuple[float, Command | None]:
        """Returns for how long to wait before the next pull, a part of `left_s`, and the command
        that waits in the server until something is queued after `before.last`; None: sleep."""
        if before.held is not Held.NONE:  # no entry comes when they are opened again
            left_s = min(HELD_S, left_s)
        if before.deferred_ms:  # until then this portion may grow, as others end jobs
            left_s = min(POLL_S, left_s)
        for due_ms in filter(None, (before.deferred_ms, before.left_ms)):
            left_s = min(left_s, due_ms / 1000)
        if before.held is Held.ALL:
            return left_s, None
        if not before.last:
            return min(RETRY_S, left_s), None
        if self._connections.is_fake:
            return min(POLL_S, left_s), None
        queues = before.queues[: len(before.last)]
        return left_s, _wait_for_entry(queues, before.last, left_s)

    def _ending(self, before: Pulled, left_s: float) -> AbstractAsyncContextManager[None]:
        is_due = bool(before.deferred_ms or before.left_ms)
        return _ending(self._redis, _block_ms(left_s) if is_due else None)

    def _pull_arguments(self, worker_id: str, count: int) -> tuple[Argument, ...]:
        waits_ms = (self._defer_ms, self._asking_ms, self._affinity_ms)
        return (worker_id, count, MAX_CRASHES, *waits_ms, *self._queues)

    async def _pulled(self, reply: Any) -> Pulled:
        """Decodes a pull's reply, or the error in its place. Raises ResponseError."""
        if isinstance(reply, ResponseError):
            if group_is_missing(reply):
                await self._create_groups()
                await asyncio.sleep(RETRY_S)
                return Pulled(more=True)
            if is_out_of_memory(reply):
                log.warning("Redis is out of memory (maxmemory): taking no new jobs")
                return Pulled()
            raise reply
        if reply[0] == b"NOLEASE":
            return Pulled()
        _, claims, more, last, deferred_ms, left_ms, held = reply
        self._delivered = () if deferred_ms or left_ms or held else last
        pulled = Pulled(claims, bool(more), last, deferred_ms, left_ms, Held(held), self._queues)
        if claims:
            self._take_turns()
        return pulled

    def _take_turns(self) -> None:
        """Puts another model's queue first in each lane: a pull empties the first one before it
        takes from the next."""
        width = len(self._queues) // NUM_LANES
        if width < 2:
            return
        lanes = [self._queues[at : at + width] for at in range(0, len(self._queues), width)]
        self.serve(tuple(queue for lane in lanes for queue in (*lane[1:], lane[0])))

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
