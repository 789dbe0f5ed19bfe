"""Turns: takes jobs from all partitions, and waits for them, with one number of free places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from shared.redis.connections import BLOCK_MS
from shared.tasks import cancel_and_wait
from shared.transport.partitions.partitions import Partition, Partitions
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Delivery
from shared.transport.pulls import Pulled

TAKE_PATIENCE_S = 3.0  # with a partition that is to give jobs; it reads their logs, too

Take = Callable[[Partition, int], Awaitable[tuple[Sequence[Delivery], Pulled]]]


class Turns:
    """Takes from one partition after the other, each time beginning with the next one: no two calls
    that claim are on their way at once, so that together they never claim for more places than are
    free. What waits in the servers claims nothing, so all partitions are waited for at once."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._waits: dict[int, asyncio.Task[None]] = {}  # by partition; those without one are due
        self._turn = 0

    async def take(self, count: int, block_ms: int, take: Take) -> Sequence[Delivery]:
        """Returns jobs for `count` free places, waiting up to `block_ms` for the first. Raises
        TransportError if no partition answers."""
        deadline_s = time.monotonic() + block_ms / 1000
        while True:
            one_look = block_ms <= 0
            due = [one for one in self._in_turn() if self._is_due(one) or one_look]
            taken = await self._take_from(due, count, take)
            left_s = deadline_s - time.monotonic()
            if taken or left_s <= 0:
                return taken
            waits = [self._waits.get(one.number) for one in self._partitions.present]
            pending = [wait for wait in waits if wait is not None]
            if len(pending) == len(waits):
                await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def aclose(self) -> None:
        await cancel_and_wait(*self._waits.values())

    async def _take_from(
        self, due: Sequence[Partition], count: int, take: Take
    ) -> Sequence[Delivery]:
        """Takes from each at most its share of the places, so that a full one leaves places to the
        others."""
        taken: list[Delivery] = []
        for number, one in enumerate(due):
            left = count - num_places(taken)
            if left <= 0:
                break
            share = -(-left // (len(due) - number))
            try:
                deliveries, pulled = await one.call(take(one, share), TAKE_PATIENCE_S)
            except TransportError:
                continue  # it is away now
            taken += deliveries
            if not (pulled.claims or pulled.more) and self._is_due(one):
                wait = self._wait(one, pulled)
                self._waits[one.number] = asyncio.create_task(wait, name="partition-wait")
        return taken

    def _in_turn(self) -> Sequence[Partition]:
        present = self._partitions.present
        self._turn += 1
        at = self._turn % len(present)
        return [*present[at:], *present[:at]]

    def _is_due(self, one: Partition) -> bool:
        wait = self._waits.get(one.number)
        if wait is not None and not wait.done():
            return False
        self._waits.pop(one.number, None)
        return True

    async def _wait(self, one: Partition, pulled: Pulled) -> None:
        try:
            await one.transport.queue.pulls.wait(pulled, BLOCK_MS / 1000)
        except TransportError as error:
            one.left(str(error))


def num_places(deliveries: Sequence[Delivery]) -> int:
    """Returns how many places these jobs take: one for each choice."""
    return sum(delivery.job.num_choices for delivery in deliveries)
