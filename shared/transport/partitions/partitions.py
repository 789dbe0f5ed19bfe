"""Partitions: calls one of them by a job's id, or all that answer at once.

One that does not answer is away: nothing but heartbeats and offers goes to it until one is
answered, so that its jobs wait and no others do.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from shared.keys import HOME, partition_of
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # with a partition, while others wait for it
LEASE_SHARE = 0.25  # for which a heartbeat waits for one

Result = TypeVar("Result")


class Partition:
    """One partition, and whether it answers."""

    def __init__(self, number: int, transport: RedisTransport) -> None:
        self.number = number
        self.transport = transport
        self.is_away = False
        self._outage = RateLimitedOutageLog(
            log,
            failing="a partition of Redis is unavailable; its jobs wait",
            recovered="the partition of Redis is available again; its jobs continue",
            of=STORE,
        )

    async def call(self, awaitable: Awaitable[Result], patience_s: float = PATIENCE_S) -> Result:
        """Awaits a call of this partition. If it fails, or takes longer than `patience_s`, the
        partition is away from then on. Raises TransportError."""
        try:
            async with asyncio.timeout(patience_s):
                return await awaitable
        except QueueFull:  # an answer
            raise
        except TransportError as error:
            self.left(str(error))
            raise
        except TimeoutError:
            self.left("no answer in time")
            raise TransportError(f"partition {self.number} did not answer in time") from None

    def came_back(self) -> None:
        """Notes an answered heartbeat or offer: calls go to it again."""
        self.is_away = False
        self._outage.succeeded()

    def left(self, reason: str) -> None:
        """Notes that it does not answer: nothing but heartbeats goes to it."""
        self.is_away = True
        self._outage.failed(partition=self.number, error=reason)


class Partitions:
    """All partitions of a deployment; the first `num_new` of them get its new jobs."""

    def __init__(self, transports: Sequence[RedisTransport], num_new: int) -> None:
        self.all = [Partition(number, one) for number, one in enumerate(transports)]
        self.num_new = num_new
        self._turn = random.randrange(num_new)  # frontends that start together begin apart
        self._beats: dict[int, asyncio.Task[Any]] = {}  # of partitions that are away

    @property
    def home(self) -> RedisTransport:
        """The partition of files, batches and secrets."""
        return self.all[HOME].transport

    @property
    def present(self) -> Sequence[Partition]:
        """The partitions that answer. Raises TransportError if all are away."""
        present = [one for one in self.all if not one.is_away]
        if not present:
            raise TransportError("no partition of Redis answers")
        return present

    def of(self, job_id: str) -> Partition:
        """Returns the job's partition; home for one that this process does not have, where no such
        job is found."""
        number = partition_of(job_id)
        return self.all[number if number < len(self.all) else HOME]

    def for_new_job(self, name: str = "", num: int = 0) -> int:
        """Returns the partition that `name` determines, of the first `num` where this process has
        them, else of those for new jobs; without a name the next of those that answer."""
        if name:
            has_them = 0 < num <= len(self.all)
            return zlib.crc32(name.encode()) % (num if has_them else self.num_new)
        numbers = [one.number for one in self.all[: self.num_new] if not one.is_away]
        self._turn += 1
        return numbers[self._turn % len(numbers)] if numbers else HOME

    async def each(
        self,
        call: Callable[[Partition], Awaitable[Result]],
        *,
        of: Sequence[Partition] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> dict[int, Result]:
        """Calls at once all partitions that answer, or those `of` these. Returns the results by
        number, of those that did. Raises TransportError if none did."""

        async def called_one(one: Partition) -> Result:  # a cancel before it starts leaves no call
            return await one.call(call(one), patience_s)

        called = self.present if of is None else [one for one in of if not one.is_away]
        results = await asyncio.gather(*map(called_one, called), return_exceptions=True)
        found: dict[int, Result] = {}
        failed: TransportError | None = None
        for one, result in zip(called, results, strict=True):
            if isinstance(result, TransportError):
                failed = result
            elif isinstance(result, BaseException):
                raise result
            else:
                found[one.number] = result
        if failed is not None and not found:
            raise failed
        return found

    async def every(self, call: Callable[[Partition], Awaitable[Result]]) -> dict[int, Result]:
        """Calls all partitions. Raises TransportError if one is away or fails."""
        away = [one.number for one in self.all if one.is_away]
        found = {} if away else await self.each(call)
        if len(found) < len(self.all):
            raise TransportError(f"partitions of Redis do not answer: {away or 'one has failed'}")
        return found

    async def beat(
        self, call: Callable[[Partition], Awaitable[Result]], patience_s: float
    ) -> dict[int, Result]:
        """Calls as `each`, and those that are away without waiting for them."""
        for one in self.all:
            if one.is_away and one.number not in self._beats:
                self._beats[one.number] = asyncio.create_task(self._try(one, call))
        if all(one.is_away for one in self.all):
            await asyncio.wait([*self._beats.values()], timeout=patience_s)
        return await self.each(call, patience_s=patience_s)

    async def _try(self, one: Partition, call: Callable[[Partition], Awaitable[object]]) -> None:
        try:
            await call(one)
        except TransportError as error:
            one.left(str(error))
        else:
            one.came_back()
        finally:
            del self._beats[one.number]

    async def aclose(self) -> None:
        await cancel_and_wait(*self._beats.values())
        for one in self.all:
            await one.transport.aclose()
