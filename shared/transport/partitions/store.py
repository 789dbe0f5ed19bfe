"""The ports of jobs over partitions: their store, events, durability, and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from shared.keys import HOME, partition_of
from shared.messages import Cursor, Delta, Durability, Job, JobEvent, JobState
from shared.partitions import by_partition
from shared.transport.batch_store import RedisBatchStore
from shared.transport.event_bus import RedisEventBus, RedisSubscription
from shared.transport.job_store import RedisJobStore
from shared.transport.partitions.partitions import LEASE_SHARE, Partition, Partitions
from shared.transport.ports.admission import (
    AdmissionLimits,
    DurabilityFault,
    KeptKey,
    QueueFull,
    Submission,
)
from shared.transport.ports.batches import (
    BatchClaim,
    BatchProgress,
    BatchStatus,
    Saved,
)
from shared.transport.ports.jobs import (
    Allowance,
    CancelResult,
    Expired,
    JobLook,
    JobRecord,
    Restored,
    Subscription,
)

QUEUED_TOKENS = frozenset({"max_queued_tokens", "max_queued_tokens_per_tenant"})

Item = TypeVar("Item")
Result = TypeVar("Result")


class PartitionedJobStore:
    """Implements SubmittingStore. Limits are divided: a partition has its part of each, rounded
    up."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._lapsed: set[int] = set()  # where this frontend's lease had ended

    def _of(self, job_id: str) -> RedisJobStore:
        return self._partitions.of(job_id).transport.store

    def partition_for(self, name: str = "", num: int = 0) -> int:
        return self._partitions.for_new_job(name, num)

    def partition_of(self, job_id: str) -> int:
        return self._partitions.of(job_id).number

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        num = self._partitions.num_new
        try:
            part = part_of(limits, num, len(job.prompt_token_ids))
            submission = await self._of(job.job_id).submit(job, part, reader_id)
        except QueueFull as full:
            left = whole_of(full.allowances, limits, num)
            raise QueueFull(full.scope, full.retry_after_s, left) from full
        return replace(submission, allowances=whole_of(submission.allowances, limits, num))

    async def requeue(self, dead_letter_id: str, job: Job, limits: AdmissionLimits) -> str | None:
        if partition_of(dead_letter_id) != partition_of(job.job_id):
            raise ValueError("a dead letter is replaced by a job of its own partition")
        part = part_of(limits, self._partitions.num_new, len(job.prompt_token_ids))
        return await self._of(job.job_id).requeue(dead_letter_id, job, part)

    async def submit_again(self, job: Job, timeout_ms: int, reader_id: str = "") -> Restored:
        return await self._of(job.job_id).submit_again(job, timeout_ms, reader_id)

    async def kept_key(self, key: str) -> KeptKey | None:
        """Asks every partition: a key keeps its job though the number of partitions has changed
        since. One that is away is left out."""
        found = await self._partitions.each(lambda one: one.transport.store.kept_key(key))
        kept = [one for one in found.values() if one is not None]
        return next((one for one in kept if one.is_binding), kept[0] if kept else None)

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        return await self._grouped(job_ids, job_ids, lambda store, ids: store.states(ids))

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        return await self._of(job_id).read_log(job_id, after, count)

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        return await self._grouped(job_ids, job_ids, lambda store, ids: store.look(ids))

    async def get(self, job_id: str) -> JobRecord | None:
        return await self._of(job_id).get(job_id)

    async def expired(self, job_id: str) -> Expired | None:
        return await self._of(job_id).expired(job_id)

    async def request_record(self, job_id: str) -> str | None:
        return await self._of(job_id).request_record(job_id)

    async def stored_bytes(self, job_id: str) -> int:
        return await self._of(job_id).stored_bytes(job_id)

    async def cancel(self, job_id: str, reason: str) -> CancelResult | None:
        return await self._of(job_id).cancel(job_id, reason)

    async def forget(self, job_id: str) -> bool:
        return await self._of(job_id).forget(job_id)

    async def renew(self, job_ids: Sequence[str]) -> None:
        async def renew(store: RedisJobStore, ids: Sequence[str]) -> Sequence[None]:
            await store.renew(ids)
            return [None] * len(ids)

        await self._grouped(job_ids, job_ids, renew)

    async def attach(self, readers: Sequence[tuple[str, str]]) -> Sequence[JobState | None]:
        """Leaves out readers of a partition that is away, unless there are no others: when it
        is back, its heartbeat returns that the lease had ended, and all readers attach."""
        ids = [job_id for job_id, _ in readers]
        groups = by_partition(ids)
        if len(groups) > 1:
            away = {one.number for one in self._partitions.all if one.is_away}
            present = [at for number, ats in groups.items() if number not in away for at in ats]
            states: list[JobState | None] = [None] * len(readers)
            attached = await self._grouped(
                [ids[at] for at in present],
                [readers[at] for at in present],
                lambda store, ones: store.attach(ones),
            )
            for at, state in zip(present, attached, strict=True):
                states[at] = state
            return states
        return await self._grouped(ids, readers, lambda store, ones: store.attach(ones))

    async def detach(self, job_id: str, reader_id: str) -> None:
        await self._of(job_id).detach(job_id, reader_id)

    async def frontend_heartbeat(self, frontend_id: str, lease_ms: int) -> bool:
        async def beat(one: Partition) -> None:
            if not await one.transport.store.frontend_heartbeat(frontend_id, lease_ms):
                self._lapsed.add(one.number)

        await self._partitions.beat(beat, LEASE_SHARE * lease_ms / 1000)
        lapsed, self._lapsed = self._lapsed, set()  # also of those that came back since
        return not lapsed

    async def reap(self) -> int:
        found = await self._partitions.each(lambda one: one.transport.store.reap())
        return sum(found.values())

    async def shared_secret(self, purpose: str) -> bytes:
        return await self._partitions.home.store.shared_secret(purpose)

    async def ping(self) -> float:
        found = await self._partitions.each(lambda one: one.transport.store.ping())
        return max(found.values())

    async def _grouped(
        self,
        ids: Sequence[str],
        items: Sequence[Item],
        call: Callable[[RedisJobStore, Sequence[Item]], Awaitable[Sequence[Result]]],
    ) -> Sequence[Result]:
        """Calls each partition with its items; returns the results in the order of `items`. All
        calls end, also where one fails. Raises TransportError."""
        groups = by_partition(ids)
        found = await asyncio.gather(
            *(
                call(self._of(ids[indexes[0]]), [items[index] for index in indexes])
                for indexes in groups.values()
            ),
            return_exceptions=True,
        )
        results: dict[int, Result] = {}
        for indexes, group in zip(groups.values(), found, strict=True):
            if isinstance(group, BaseException):
                raise group
            results.update(zip(indexes, group, strict=True))
        return [results[index] for index in range(len(items))]


def part_of(limits: AdmissionLimits, num: int, prompt_tokens: int) -> AdmissionLimits:
    """Returns the limits of one of `num` partitions for a job; shares stay shares. A prompt that
    the whole limit has room for fits into an empty partition."""
    parts: dict[str, int] = {}
    for field in fields(limits):
        value = getattr(limits, field.name)
        if isinstance(value, int):
            parts[field.name] = -(-value // num)
            if field.name in QUEUED_TOKENS:
                parts[field.name] = max(parts[field.name], min(value, prompt_tokens))
    return replace(limits, **parts)


def whole_of(
    allowances: Sequence[Allowance], limits: AdmissionLimits, num: int
) -> tuple[Allowance, ...]:
    """Returns a tenant's allowances in all partitions, as one of them shows them."""
    whole = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
    return tuple(
        Allowance(
            one.name,
            limit := whole[one.name] or one.per_minute,
            min(limit, one.remaining * num),
            one.full_in_ms,
        )
        for one in allowances
    )


class PartitionedEventBus:
    """Implements EventBus: a connection for each partition."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def start(self) -> None:
        for one in self._partitions.all:
            await one.transport.bus.start()

    async def aclose(self) -> None:
        for one in self._partitions.all:
            await one.transport.bus.aclose()

    async def subscribe(self, job_id: str) -> Subscription:
        return await self._partitions.of(job_id).transport.bus.subscribe(job_id)

    async def begin(self, job_id: str) -> Subscription:
        return await self._partitions.of(job_id).transport.bus.begin(job_id)

    def _bus_of(self, subscription: Subscription) -> RedisEventBus:
        assert isinstance(subscription, RedisSubscription)
        return self._partitions.of(subscription.job_id).transport.bus

    async def confirmed(self, subscription: Subscription) -> None:
        await self._bus_of(subscription).confirmed(subscription)

    async def unsubscribe(self, subscription: Subscription) -> None:
        await self._bus_of(subscription).unsubscribe(subscription)


class PartitionedDurability:
    """Implements DurabilityChecks."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def durability_fault(
        self, durability: Durability, num_replicas: int
    ) -> DurabilityFault | None:
        found = await self._partitions.each(
            lambda one: one.transport.durability.durability_fault(durability, num_replicas)
        )
        return next((fault for fault in found.values() if fault is not None), None)

    async def confirm(
        self,
        kind: str,
        names: Sequence[str],
        durability: Durability,
        num_replicas: int,
        timeout_s: float,
    ) -> bool:
        groups = by_partition(names)  # the name of a batch is no job id: home has it
        are_there = await asyncio.gather(
            *(
                self._partitions.of(names[indexes[0]]).transport.durability.confirm(
                    kind, [names[at] for at in indexes], durability, num_replicas, timeout_s
                )
                for indexes in groups.values()
            )
        )
        return all(are_there)


class PartitionedBatchStore(RedisBatchStore):
    """Keeps batches at home; the jobs of their rows are in all partitions."""

    def __init__(self, partitions: Partitions) -> None:
        home = partitions.home
        super().__init__(home.keys, home.connections.commands, home.scripts, partitions.num_new)
        self._partitions = partitions

    async def save(
        self,
        claim: BatchClaim,
        lease_ms: int,
        progress: BatchProgress | None = None,
        *,
        status: BatchStatus | None = None,
        job_ids: Sequence[str] = (),
    ) -> Saved:
        groups = by_partition(job_ids)
        at_home = [job_ids[at] for at in groups.pop(HOME, ())]
        saved = await super().save(claim, lease_ms, progress, status=status, job_ids=at_home)
        others = [self._partitions.all[number] for number in groups]
        await self._partitions.each(
            lambda one: one.transport.store.saved([job_ids[at] for at in groups[one.number]]),
            of=others,
        )
        return saved
