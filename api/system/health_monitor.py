"""HealthMonitor: a picture of workers, queue and store, taken regularly so that it is at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any

from api.dependencies import provided
from api.system.protocol import Health, HealthStatus, ModelLoad
from shared.transport.ports.jobs import JobStore, TransportError
from shared.transport.ports.registry import QueueStats, WorkerRegistry, WorkerStatus

log = logging.getLogger(__name__)

MAX_AGE_S = 5.0  # older pictures do not count as ready


class HealthMonitor:
    """The last picture. Empty until `refresh` has succeeded once."""

    def __init__(self, store: JobStore, registry: WorkerRegistry) -> None:
        self._store = store
        self._registry = registry
        self.workers: Sequence[WorkerStatus] = ()
        self.queue: QueueStats | None = None
        self.redis_latency_s: float | None = None
        self.reachable = False
        self._taken_s: float | None = None

    async def refresh(self) -> None:
        """Raises TransportError; the old picture stays then, marked as out of reach."""
        try:
            latency_s = await self._store.ping()
            workers = await self._registry.workers()
            queue = await self._registry.queue_stats()
        except TransportError:
            self.reachable = False
            raise
        self.redis_latency_s, self.workers, self.queue = latency_s, workers, queue
        self.reachable = True
        self._taken_s = time.monotonic()

    @property
    def age_s(self) -> float | None:
        return None if self._taken_s is None else time.monotonic() - self._taken_s

    @property
    def num_running(self) -> int:
        """Jobs in an engine's batch: in prefill or decoding."""
        return sum(
            _count(worker, "prefilling") + _count(worker, "active") for worker in self.workers
        )

    @property
    def num_waiting(self) -> int:
        """Jobs that wait, in the queue or at a worker."""
        queued = 0 if self.queue is None else self.queue.queued
        return queued + sum(
            _count(worker, "waiting") + _count(worker, "pending") for worker in self.workers
        )

    @property
    def status(self) -> HealthStatus:
        """ok, stalled (an engine makes no steps), no_workers, or degraded (no store)."""
        if not self.is_fresh:
            return "degraded"
        if any(worker.stalled for worker in self.workers):
            return "stalled"
        return "ok" if self.workers else "no_workers"

    @property
    def is_fresh(self) -> bool:
        """The last look into the store succeeded, not long ago."""
        return self.reachable and (self.age_s or 0.0) <= MAX_AGE_S

    def models(self) -> dict[str, ModelLoad]:
        """Returns the load of each announced model, by its name."""
        queued = {} if self.queue is None else self.queue.queued_by_model
        served = [model for worker in self.workers for model in worker.models]
        return {
            name: ModelLoad(waiting=queued.get(name, 0), workers=served.count(name))
            for name in sorted({*queued, *served})
        }

    def report(self) -> Health:
        """Returns the body of GET /health."""
        return Health(
            status=self.status,
            running=self.num_running,
            waiting=self.num_waiting,
            models=self.models(),
            queued_tokens=0 if self.queue is None else self.queue.queued_tokens,
            redis={
                "reachable": self.reachable,
                "latency_ms": _milliseconds(self.redis_latency_s),
            },
            age_ms=_milliseconds(self.age_s),
            workers=[_worker(worker) for worker in self.workers],
        )


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    counts = {
        name: _count(worker, name)
        for name in ("step", "waiting", "prefilling", "active", "pending")
    }
    others = {name: _plain(value) for name, value in worker.stats.items() if name not in counts}
    return {
        "id": worker.worker_id,
        "status": "stalled" if worker.stalled else "draining" if worker.draining else "ok",
        "models": worker.models,
        **counts,
        **others,
        "beat_age_ms": _milliseconds(worker.heartbeat_age_s),
    }


def _count(worker: WorkerStatus, name: str) -> int:
    value = worker.stats.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _plain(value: float | str) -> float | int | str:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


HealthDep = Annotated[HealthMonitor, provided(HealthMonitor)]
