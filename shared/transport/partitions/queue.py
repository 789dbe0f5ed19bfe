"""JobQueue over partitions."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from shared.keys import NUM_LANES
from shared.partitions import by_partition
from shared.tasks import cancel_and_wait
from shared.transport.partitions.partitions import (
    LEASE_SHARE,
    PATIENCE_S,
    Partition,
    Partitions,
)
from shared.transport.partitions.turns import Turns, num_places
from shared.transport.ports.deployment import Spent
from shared.transport.ports.jobs import Restored, TransportError
from shared.transport.ports.queue import (
    Append,
    AppendResult,
    CrashCause,
    Delivery,
    HeartbeatReply,
    JobSnapshot,
    WorkerReport,
)

# With a partition that is to give jobs with their logs, which may be long. One that hangs is
# noticed sooner: each command has a timeout of its own.
LOGS_PATIENCE_S = 60.0
MAX_RECOVERED = 8  # places for which one call takes jobs of dead workers from one partition
RECOVER_S = 0.1  # between looks for jobs of dead workers in one partition
ANNOUNCE_PATIENCE_S = 10.0  # a tokenizer has megabytes

_NEVER = float("-inf")


class PartitionedJobQueue:
    """Implements JobQueue: a worker is registered in every partition, with the same id."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._pulling = Turns(partitions)
        self._overtaking = Turns(partitions)
        self._recover_s: dict[int, float] = {}  # when each may be looked at again
        self._turn = 0
        self._unspent: Sequence[Spent] = ()  # that the partition which keeps the accounts may lack

    def is_away(self, job_id: str) -> bool:
        return self._partitions.of(job_id).is_away and not all(
            one.is_away for one in self._partitions.all
        )

    async def setup(self, models: Sequence[str]) -> None:
        for one in self._partitions.all:  # one that is away gets its groups from its next pull
            one.transport.queue.serve(models)
        await self._partitions.each(
            lambda one: one.transport.queue.setup(models), of=self._partitions.all
        )

    async def heartbeat(self, report: WorkerReport) -> HeartbeatReply:
        ids = [job_id for job_id, _ in report.running]
        running = {
            number: [report.running[index] for index in indexes]
            for number, indexes in by_partition(ids).items()
        }
        spent = [*self._unspent, *report.spent]
        accountant = next((one.number for one in self._partitions.all if not one.is_away), None)

        def beat(one: Partition) -> Awaitable[HeartbeatReply]:
            mine = replace(
                report,
                running=running.get(one.number, ()),
                spent=spent if one.number == accountant else (),
            )
            return one.transport.queue.heartbeat(mine)

        patience_s = min(PATIENCE_S, LEASE_SHARE * report.lease_ms / 1000)
        found = await self._partitions.beat(beat, patience_s)
        self._unspent = () if accountant in found else spent
        replies = [found[number] for number in sorted(found)]
        return HeartbeatReply(
            dropped=[job_id for reply in replies for job_id in reply.dropped],
            lost=[job_id for reply in replies for job_id in reply.lost],
            taken=[job_id for reply in replies for job_id in reply.taken],
            order=next((reply.order for reply in replies if reply.order is not None), None),
            num_workers=max(reply.num_workers for reply in replies),
            num_prefixes=min(reply.num_prefixes for reply in replies),
            unheard=[
                job_id
                for number, jobs in running.items()
                if number not in found
                for job_id, _ in jobs
            ],
        )

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        if count <= 0:
            return []
        return await self._pulling.take(
            count, block_ms, lambda one, share: one.transport.queue.pulls.take(worker_id, share)
        )

    async def overtake(
        self, worker_id: str, count: int, lane: int, block_ms: int
    ) -> Sequence[Delivery]:
        return await self._overtaking.take(
            count,
            block_ms,
            lambda one, share: one.transport.queue.pulls.take_ahead(worker_id, share, lane),
        )

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        return await self._one_by_one(
            count,
            lambda one, left: one.transport.queue.oversubscribe(worker_id, left, leave_out),
            len,
        )

    async def recover(
        self, worker_id: str, count: int, *, suspects: bool = True, before: int = NUM_LANES
    ) -> Sequence[Delivery]:
        return await self._one_by_one(
            count,
            lambda one, left: one.transport.queue.recover(
                worker_id, min(left, MAX_RECOVERED), suspects=suspects, before=before
            ),
            num_places,
            self._recover_s,
        )

    async def _one_by_one(
        self,
        count: int,
        take: Callable[[Partition, int], Awaitable[Sequence[Delivery]]],
        size: Callable[[Sequence[Delivery]], int],
        due_s: dict[int, float] | None = None,
    ) -> Sequence[Delivery]:
        """Takes from the partitions in turn until `count` is reached; with `due_s` from one that
        had nothing only RECOVER_S later."""
        present = self._partitions.present
        self._turn += 1
        at = self._turn % len(present)
        taken: list[Delivery] = []
        for one in [*present[at:], *present[:at]]:
            left = count - size(taken)
            if left <= 0:
                break
            now_s = time.monotonic()
            if due_s is not None and now_s < due_s.get(one.number, _NEVER):
                continue
            try:
                found = await one.call(take(one, left), LOGS_PATIENCE_S)
            except TransportError:
                continue  # it is away now
            if due_s is not None and not found:
                due_s[one.number] = now_s + RECOVER_S
            taken += found
        return taken

    async def note_prefixes(
        self,
        worker_id: str,
        lease_ms: int,
        held: Sequence[bytes],
        lost: Sequence[bytes],
        *,
        is_first: bool,
    ) -> int | None:
        found = await self._partitions.each(
            lambda one: one.transport.queue.note_prefixes(
                worker_id, lease_ms, held, lost, is_first=is_first
            )
        )
        numbers = [number for number in found.values() if number is not None]
        return min(numbers) if len(numbers) == len(found) else None

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        found = await self._partitions.each(
            lambda one: one.transport.queue.reconcile(worker_id, known),
            patience_s=LOGS_PATIENCE_S,
        )
        return list(itertools.chain.from_iterable(found.values()))

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        groups = by_partition(item.job_id for item in items)

        async def append_to(indexes: Sequence[int]) -> Sequence[AppendResult]:
            mine = [items[index] for index in indexes]
            one = self._partitions.of(mine[0].job_id)
            return await one.call(one.transport.queue.append(worker_id, lease_ms, mine))

        found = await asyncio.gather(*map(append_to, groups.values()))
        results: dict[int, AppendResult] = {}
        for indexes, group in zip(groups.values(), found, strict=True):
            results.update(zip(indexes, group, strict=True))
        return [results[index] for index in range(len(items))]

    async def restore(
        self, worker_id: str, job_id: str, attempt: int, snapshot: JobSnapshot, sure_ms: int
    ) -> Restored:
        one = self._partitions.of(job_id)
        return await one.call(
            one.transport.queue.restore(worker_id, job_id, attempt, snapshot, sure_ms)
        )

    async def release(
        self, worker_id: str, job_id: str, attempt: int, num_lane_preemptions: int = 0
    ) -> bool:
        one = self._partitions.of(job_id)
        return await one.call(
            one.transport.queue.release(worker_id, job_id, attempt, num_lane_preemptions)
        )

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        for indexes in by_partition(job_id for job_id, _ in jobs).values():
            mine = [jobs[index] for index in indexes]
            one = self._partitions.of(mine[0][0])
            await one.call(one.transport.queue.crashed(worker_id, mine, cause))

    async def retire(self, worker_id: str, *, returns: bool = False) -> None:
        where = self._partitions.every if returns else self._partitions.each
        await where(lambda one: one.transport.queue.retire(worker_id, returns=returns))

    async def declare_dead(self, worker_id: str) -> None:
        """Ends the lease of a worker whose process has died: its jobs may be recovered at once."""
        await self._partitions.each(lambda one: one.transport.queue.declare_dead(worker_id))

    async def cancellations(self, worker_id: str) -> AsyncIterator[str]:
        hints: asyncio.Queue[str] = asyncio.Queue(maxsize=1)  # each partition keeps its own

        async def listen(one: Partition) -> None:
            async for job_id in one.transport.queue.cancellations(worker_id):
                await hints.put(job_id)

        listening = [asyncio.create_task(listen(one)) for one in self._partitions.all]
        try:
            while True:
                yield await hints.get()
        finally:
            await cancel_and_wait(*listening)

    async def announce(self, model: str, card: bytes, blobs: Mapping[str, bytes]) -> None:
        await self._partitions.each(
            lambda one: one.transport.queue.announce(model, card, blobs),
            patience_s=ANNOUNCE_PATIENCE_S,
        )

    async def aclose(self) -> None:
        await self._pulling.aclose()
        await self._overtaking.aclose()
