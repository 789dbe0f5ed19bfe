"""Workers, queues and what people look at, over partitions: sums and unions of what each knows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shared.keys import HOME
from shared.transport.partitions.partitions import PATIENCE_S, Partition, Partitions
from shared.transport.ports.deployment import (
    HISTORY_SLOT_S,
    NO_SAMPLE,
    History,
    HistorySlot,
    ProcessKind,
    ProcessReport,
    Sample,
    Spent,
    TenantLoad,
)
from shared.transport.ports.offers import WaitingModel
from shared.transport.ports.registry import (
    AnnouncedModel,
    Order,
    Ordered,
    QueueStats,
    TooManyPaused,
    WorkerStatus,
)
from shared.transport.worker_registry import MAX_SHOWN_TENANTS

BLOB_PATIENCE_S = 10.0  # a tokenizer has megabytes

Value = TypeVar("Value")

SUMMED = ("accepted", "ended", "failed", "expired", "tokens_in", "tokens_out")
LARGEST = ("unavailable", "errors", "queue_age_s", "kv_permille", "store_used", "store_limit")


class PartitionedWorkerRegistry:
    """Implements WorkerRegistry. A worker is in every partition; what it reports is the same."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._stats: dict[int, QueueStats] = {}  # of each partition as last read

    async def workers(self) -> Sequence[WorkerStatus]:
        found = await self._partitions.each(lambda one: one.transport.registry.workers())
        latest: dict[str, WorkerStatus] = {}
        for worker in itertools.chain.from_iterable(found.values()):
            known = latest.get(worker.worker_id)
            if known is None or worker.heartbeat_age_s < known.heartbeat_age_s:
                latest[worker.worker_id] = worker
        return [latest[name] for name in sorted(latest)]

    async def queue_stats(self) -> QueueStats:
        """Returns the totals; a partition that is away counts as it was last: its jobs wait there,
        and a total that fell would look like a restart. Memory and disk are those of the servers
        that answer: a full one that is away refuses nothing."""
        found = await self._partitions.each(lambda one: one.transport.registry.queue_stats())
        self._stats |= found
        away = frozenset(one.number for one in self._partitions.all if one.is_away)
        known = dict(sorted(self._stats.items()))
        now = merged_stats(list(found.values()))
        return replace(
            merged_stats(list(known.values())),
            partitions=known,
            away=away,
            store_used=now.store_used,
            store_limit=now.store_limit,
            disk=now.disk,
        )

    async def models(self) -> Mapping[str, AnnouncedModel]:
        """Returns what the partition with the lowest number knows of each model."""
        found = await self._partitions.each(lambda one: one.transport.registry.models())
        models: dict[str, AnnouncedModel] = {}
        for number in sorted(found, reverse=True):
            models |= found[number]
        return dict(sorted(models.items()))

    async def keep_models(self, digests: Mapping[str, Sequence[str]]) -> None:
        await self._partitions.each(lambda one: one.transport.registry.keep_models(digests))

    async def get_blob(self, digest: str) -> bytes | None:
        for one in self._partitions.present:
            blob = await one.call(one.transport.registry.get_blob(digest), BLOB_PATIENCE_S)
            if blob is not None:
                return blob
        return None

    async def order(self, worker_id: str, order: Order) -> Ordered:
        found = await self._partitions.every(
            lambda one: one.transport.registry.order(worker_id, order)
        )
        ordered = set(found.values())
        # A worker that has just come back to one of them is known to the others.
        return next(word for word in (Ordered.OLD, Ordered.OK, Ordered.GONE) if word in ordered)

    async def pause(self, model: str, by: str) -> bool | None:
        async def pause(one: Partition) -> bool | None:
            try:
                return await one.transport.registry.pause(model, by)
            except TooManyPaused as error:
                full.append(error)
                return None

        full: list[TooManyPaused] = []
        found = await self._partitions.every(pause)
        if full:
            raise full[0]
        known = [changed for changed in found.values() if changed is not None]
        return any(known) if known else None

    async def resume(self, model: str) -> bool:
        found = await self._partitions.every(lambda one: one.transport.registry.resume(model))
        return any(found.values())


class PartitionedModelOffers:
    """Implements ModelOffers. The home partition has the claims: without it no model is loaded."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def offer(
        self,
        worker_id: str,
        models: Sequence[str],
        *,
        life_ms: int,
        bound_ms: int,
        swap_ms: int,
        claimed: str = "",
        failed: Sequence[str] = (),
    ) -> Sequence[WaitingModel]:
        # As no heartbeats are sent while a model loads, this notices a partition that is back.
        found = await self._partitions.beat(
            lambda one: one.transport.offers.offer(
                worker_id,
                models,
                life_ms=life_ms,
                bound_ms=bound_ms,
                swap_ms=swap_ms,
                claimed=claimed,
                failed=failed,
            ),
            PATIENCE_S,
        )
        return [
            WaitingModel(
                model,
                sum(queue.num_waiting for queue in queues),
                max(queue.oldest_ms for queue in queues),
                max(queue.num_workers for queue in queues),
                any(queue.is_claimed for queue in queues),
                any(queue.is_drained_for for queue in queues),
            )
            for model, queues in zip(models, zip(*found.values(), strict=True), strict=True)
        ]

    async def claim(
        self, worker_id: str, model: str, life_ms: int, *, unserved: bool, drains: bool
    ) -> bool:
        home = self._partitions.all[HOME]
        return await home.call(
            home.transport.offers.claim(worker_id, model, life_ms, unserved=unserved, drains=drains)
        )


def merged_stats(stats: Sequence[QueueStats]) -> QueueStats:
    """Returns the figures of partitions as those of one queue. Memory and disk are those of the
    fullest server."""
    fullest = max(stats, key=lambda one: (one.store_used / (one.store_limit or 1), one.store_used))
    held = _sums(one.held_by_tenant for one in stats)
    return QueueStats(
        queued=sum(one.queued for one in stats),
        running=sum(one.running for one in stats),
        queued_tokens=sum(one.queued_tokens for one in stats),
        totals=_sums(one.totals for one in stats),
        queued_by_model=_sums(one.queued_by_model for one in stats),
        queue_age_s=_largest(one.queue_age_s for one in stats),
        dead_letters=sum(one.dead_letters for one in stats),
        store_used=fullest.store_used,
        store_limit=fullest.store_limit,
        disk={name: min(one.disk.get(name, 1) for one in stats) for name in fullest.disk},
        held_by_tenant=dict(itertools.islice(held.items(), MAX_SHOWN_TENANTS)),
        cpu_us_by_tenant=_sums(one.cpu_us_by_tenant for one in stats),
        refused_by_tenant=_sums(one.refused_by_tenant for one in stats),
        paused={name: pause for one in stats for name, pause in one.paused.items()},
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums, the largest first."""
    sums: Counter[str] = Counter()
    for one in counts:
        for name, number in one.items():
            sums[name] += number  # keeps zeros
    return dict(sums.most_common())


def _largest(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for one in figures:
        for name, value in one.items():
            largest[name] = max(value, largest.get(name, value))
    return largest


class PartitionedDeployment:
    """Implements Deployment. Reports go to the first partition that answers."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def report(
        self,
        kind: ProcessKind,
        process_id: str,
        stats: Mapping[str, str | int],
        spent: Sequence[Spent] = (),
        sample: Sample = NO_SAMPLE,
    ) -> None:
        one = self._partitions.present[0]
        await one.call(one.transport.deployment.report(kind, process_id, stats, spent, sample))

    async def reports(self, kind: ProcessKind, limit: int) -> Sequence[ProcessReport]:
        found = await self._partitions.each(
            lambda one: one.transport.deployment.reports(kind, limit)
        )
        latest: dict[str, ProcessReport] = {}
        for report in itertools.chain.from_iterable(found.values()):
            known = latest.get(report.process_id)
            if known is None or report.age_s < known.age_s:
                latest[report.process_id] = report
        return [latest[name] for name in sorted(latest)][:limit]

    async def tenants(self, names: Sequence[str]) -> Sequence[TenantLoad]:
        found = await self._partitions.each(lambda one: one.transport.deployment.tenants(names))
        return [
            TenantLoad(
                name,
                sum(load.queued for load in loads),
                sum(load.running for load in loads),
                sum(load.queued_tokens for load in loads),
            )
            for name, loads in zip(names, zip(*found.values(), strict=True), strict=True)
        ]

    async def history(self, num_slots: int, slot_s: int = HISTORY_SLOT_S) -> History:
        found = await self._partitions.each(
            lambda one: one.transport.deployment.history(num_slots, slot_s)
        )
        histories = list(found.values())
        by_number: dict[int, list[HistorySlot]] = {slot.number: [] for slot in histories[0].slots}
        for slot in itertools.chain.from_iterable(one.slots for one in histories):
            if slot.number in by_number:  # another server's clock may be ahead
                by_number[slot.number].append(slot)
        return History(histories[0].now_s, [merged_slot(slots) for slots in by_number.values()])


def merged_slot(slots: Sequence[HistorySlot]) -> HistorySlot:
    """Returns the slots of partitions as one. `queued` and `running` are at most the sum of the
    most in each."""
    ttft = Counter[int]()
    for slot in slots:
        ttft.update(slot.ttft)

    def over(names: Sequence[str], put: Callable[[Iterable[int]], int]) -> dict[str, Any]:
        values = {name: [getattr(slot, name) for slot in slots] for name in names}
        known = {name: [n for n in ones if n is not None] for name, ones in values.items()}
        return {name: put(ones) for name, ones in known.items() if ones}

    sums = over(("queued", "running", *SUMMED), sum)
    return replace(slots[0], ttft=dict(ttft), **sums, **over(LARGEST, max))
