"""WorkerRegistry over Redis."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shared.keys import NUM_LANES, Keys
from shared.redis.connections import Connections
from shared.transport.drain_rate import DrainRates
from shared.transport.failures import translated
from shared.transport.model_offers import offered_models
from shared.transport.ports.registry import (
    CARD_LIFE_MS,
    RESERVED_STATS,
    AnnouncedModel,
    Offer,
    Order,
    Ordered,
    Pause,
    QueueStats,
    TooManyPaused,
    WorkerStatus,
)
from shared.transport.scripts import Scripts

Hash = Mapping[bytes, bytes]
MAX_SHOWN_TENANTS = 16


class RedisWorkerRegistry:
    """Implements WorkerRegistry; measures `drains` in passing."""

    def __init__(
        self,
        keys: Keys,
        connections: Connections,
        scripts: Scripts,
        drains: DrainRates,
        share: float = 1.0,
    ) -> None:
        """`share`: the part of the workers' tokens that are of jobs from here."""
        self._share = share
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts
        self._drains = drains
        self._clock = time.monotonic
        self._workers: Sequence[WorkerStatus] = ()  # as last seen
        self._announced: Sequence[str] = ()  # names of models, as last seen

    async def workers(self) -> Sequence[WorkerStatus]:
        with translated("workers"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.hkeys(self._keys.workers)
            pipe.hkeys(self._keys.models)
            known, announced = await pipe.execute()
            names = sorted(known)
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            for name in names:
                pipe.hgetall(self._keys.worker(name.decode()))
            time, *hashes = await pipe.execute()
        now_ms = _milliseconds(time)
        self._announced = sorted(name.decode() for name in announced)
        self._workers = [
            worker_status(name.decode(), fields, now_ms)
            for name, fields in zip(names, hashes, strict=True)
            if b"beat_ms" in fields  # else its lease ended
        ]
        return self._workers

    async def queue_stats(self) -> QueueStats:
        models = sorted({model for worker in self._workers for model in worker.models})
        names = sorted({*models, *self._announced})
        with translated("queue_stats"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.hgetall(self._keys.stat)
            pipe.hgetall(self._keys.paused)
            for model in models:
                pipe.hmget(self._keys.work(model), list(map(str, range(NUM_LANES))))
            for name in names:
                pipe.zcard(self._keys.queued_for(name))
                pipe.zrange(self._keys.queued_for(name), 0, 0)
            pipe.xlen(self._keys.dead_letters)
            of_tenants = (self._keys.held, self._keys.cpu, self._keys.refused)
            for key in of_tenants:
                pipe.hgetall(key)
            fields, pauses, *replies, dead_letters, held, cpu, refused = await pipe.execute()
            lanes, of_queues = replies[: len(models)], replies[len(models) :]
            due = {name: ids[0] for name, ids in zip(names, of_queues[1::2], strict=True) if ids}
            ages_s = await self._ages_s(due)
        queued = dict(zip(names, of_queues[::2], strict=True))
        paused = {name.decode(): _pause(value) for name, value in pauses.items()}
        waiting = {
            model
            for model, work in zip(models, lanes, strict=True)
            if model not in paused and any(int(n or 0) for n in work)
        }
        totals = {
            model: {
                w.worker_id: self._share * _tokens_of(w) for w in self._workers if model in w.models
            }
            for model in models
        }
        self._drains.observe(totals, waiting, self._clock())
        return queue_stats(fields, queued, ages_s, dead_letters, (held, cpu, refused), paused)

    async def _ages_s(self, jobs: Mapping[str, bytes]) -> dict[str, float]:
        """Returns the seconds since the submits of jobs; one that has just gone is left out."""
        if not jobs:
            return {}
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        for job_id in jobs.values():
            pipe.hget(self._keys.job(job_id.decode()), "sub_ms")
        time, *submitted = await pipe.execute()
        now_ms = _milliseconds(time)
        return {
            name: max(0.0, (now_ms - int(submitted_ms)) / 1000)
            for name, submitted_ms in zip(jobs, submitted, strict=True)
            if submitted_ms is not None
        }

    async def models(self) -> Mapping[str, AnnouncedModel]:
        serving: dict[str, list[WorkerStatus]] = {}
        for worker in await self.workers():
            for model in worker.models:
                serving.setdefault(model, []).append(worker)
        with translated("models"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(self._keys.models)
            pipe.zrange(self._keys.models_seen, 0, -1, withscores=True)
            pipe.zrange(self._keys.models_kept, 0, -1, withscores=True)
            pipe.hkeys(self._keys.paused)
            pipe.hgetall(self._keys.offers)
            time, cards, seen, kept, pauses, offered = await pipe.execute()
        now_ms, seen_ms, kept_until_ms = _milliseconds(time), dict(seen), dict(kept)

        paused = set(pauses)
        offers, failed = offered_models(offered, now_ms)

        def is_stored(name: bytes) -> bool:
            """Returns whether the card's blobs exist: the card itself is dropped by the next
            announcement."""
            last_ms = max(seen_ms.get(name, 0) + CARD_LIFE_MS, kept_until_ms.get(name, 0))
            return name.decode() in serving or now_ms <= last_ms

        def unserved_s(name: bytes) -> float:
            if name.decode() in serving:
                return 0.0
            # Never 0: a worker announces also the models of its list that it does not serve now.
            return max(0.001, (now_ms - float(seen_ms.get(name, 0))) / 1000)

        return {
            name.decode(): _announced(
                card,
                unserved_s(name),
                serving.get(name.decode(), ()),
                offers.get(name.decode()),
                is_paused=name in paused,
                load_failed=name.decode() in failed,
            )
            for name, card in sorted(cards.items())
            if is_stored(name)
        }

    async def keep_models(self, digests: Mapping[str, Sequence[str]]) -> None:
        if digests:
            blobs = sorted({digest for ones in digests.values() for digest in ones})
            with translated("keep_models"):
                await self._scripts.call(
                    self._connections.scripts, "keep", CARD_LIFE_MS, len(digests), *digests, *blobs
                )

    async def get_blob(self, digest: str) -> bytes | None:
        with translated("get_blob"):
            blob: Any = await self._redis.get(self._keys.blob(digest))
        return blob if isinstance(blob, bytes) else None

    async def order(self, worker_id: str, order: Order) -> Ordered:
        with translated("order"):
            return Ordered((await self._call("order", worker_id, order.value)).decode())

    async def pause(self, model: str, by: str) -> bool | None:
        with translated("pause"):
            word, *changed = await self._call("pause", model, "1", by)
        if word == b"FULL":
            raise TooManyPaused
        return bool(changed[0]) if word == b"OK" else None

    async def resume(self, model: str) -> bool:
        with translated("resume"):
            _, changed = await self._call("pause", model, "0", "")
        return bool(changed)

    async def _call(self, name: str, *arguments: str) -> Any:
        return await self._scripts.call(self._connections.scripts, name, *arguments)


def _order(word: bytes | None) -> Order | None:
    """Returns None for a worker of an older release. Any other word is of a newer one, and so an
    order to take nothing."""
    if word is None:
        return None
    try:
        return Order(word.decode())
    except ValueError:
        return Order.DRAIN


def _pause(value: bytes) -> Pause:
    since_ms, _, by = value.decode(errors="replace").partition("|")
    return Pause(int(since_ms) if since_ms.isdigit() else 0, by)


def _milliseconds(time: tuple[int, int]) -> int:
    """Converts the reply of TIME."""
    seconds, microseconds = time
    return int(seconds) * 1000 + int(microseconds) // 1000


def _announced(
    card: bytes,
    unserved_s: float,
    workers: Sequence[WorkerStatus],
    offer: Offer | None,
    *,
    is_paused: bool,
    load_failed: bool,
) -> AnnouncedModel:
    """Returns a model with the promises that all its workers keep.

    One whose engine is still loading, or of an older release, does not report all of it.
    """
    engines = {str(worker.stats["engine"]) for worker in workers if "engine" in worker.stats}
    return AnnouncedModel(
        card,
        unserved_s,
        tuple(sorted(engines)),
        exact_resume=all(worker.stats.get("exact_resume", 1) for worker in workers),
        structured_output=all(worker.stats.get("structured_output", 1) for worker in workers),
        max_model_len=_least(workers, "max_model_len"),
        kv_capacity_tokens=_least(workers, "kv_capacity_tokens"),
        is_paused=is_paused,
        offer=offer,
        load_failed=load_failed,
    )


def _least(workers: Sequence[WorkerStatus], name: str) -> int | None:
    values = (worker.stats.get(name) for worker in workers)
    return min((int(value) for value in values if isinstance(value, float | int)), default=None)


def _tokens_of(worker: WorkerStatus) -> float:
    """Returns the tokens that its engine has computed, prompts and outputs."""
    counts = (worker.stats.get(name, 0) for name in ("prompt_tokens", "generated_tokens"))
    return sum(count for count in counts if isinstance(count, float | int))


def worker_status(worker_id: str, fields: Hash, now_ms: int) -> WorkerStatus:
    stats: dict[str, float | str] = {}
    for raw_name, raw_value in fields.items():
        name, value = raw_name.decode(errors="replace"), raw_value.decode(errors="replace")
        if name not in RESERVED_STATS:
            stats[name] = _number_or_text(value)
    return WorkerStatus(
        worker_id=worker_id,
        models=tuple(json.loads(fields.get(b"models", b"[]"))),
        heartbeat_age_s=max(0.0, (now_ms - int(fields.get(b"beat_ms", 0))) / 1000),
        draining=fields.get(b"draining") == b"1",
        stalled=fields.get(b"stalled") == b"1",
        order=_order(fields.get(b"order")),
        stats=stats,
    )


def queue_stats(
    fields: Hash,
    queued_by_model: Mapping[str, int],
    queue_age_s: Mapping[str, float],
    dead_letters: int,
    of_tenants: tuple[Hash, Hash, Hash],
    paused: Mapping[str, Pause],
) -> QueueStats:
    held, cpu, refused = map(_most_first, of_tenants)
    totals = {
        name.removesuffix(b"_total").decode(): int(value)
        for name, value in fields.items()
        if name.endswith(b"_total")
    }
    return QueueStats(
        queued=int(fields.get(b"queued", 0)),
        running=int(fields.get(b"running", 0)),
        queued_tokens=int(fields.get(b"queued_tokens", 0)),
        totals=totals,
        queued_by_model=queued_by_model,
        queue_age_s=queue_age_s,
        dead_letters=dead_letters,
        store_used=int(fields.get(b"store_used", 0)),
        store_limit=int(fields.get(b"store_limit", 0)),
        store_commands=int(fields.get(b"store_commands", 0)),
        disk={
            name.removeprefix(b"disk_").decode(): int(value)
            for name, value in fields.items()
            if name.startswith(b"disk_")
        },
        held_by_tenant=dict(itertools.islice(held.items(), MAX_SHOWN_TENANTS)),
        cpu_us_by_tenant=cpu,
        refused_by_tenant=refused,
        paused=paused,
    )


def _most_first(amounts: Hash) -> dict[str, int]:
    counted = [(tenant.decode(), int(amount)) for tenant, amount in amounts.items()]
    return dict(sorted(counted, key=lambda item: item[1], reverse=True))


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
