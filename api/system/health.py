"""GET /health, /ready and /version, and the state of the deployment that they show.

The routes never wait: HealthMonitor reads the state from the store at an interval.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter
from starlette.responses import Response

from api.dependencies import provided
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.json_response import json_response
from api.http.open_requests import OpenRequestsDep
from api.http.openapi import FREE, KEYED, errors, statuses
from api.http.shares import RESERVED
from api.system.protocol import (
    Health,
    HealthStatus,
    LoadingWorker,
    ModelLoad,
    Readiness,
    StoreState,
    Version,
)
from shared.transport.ports.admission import SubmittingStore
from shared.transport.ports.deployment import Deployment, ProcessKind, ProcessReport
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.registry import Pause, QueueStats, WorkerRegistry, WorkerStatus

log = logging.getLogger(__name__)

router = APIRouter(tags=["Service"])

_NOT_READY = "This frontend accepts no requests now."
_VERSION = version("penstock")

MAX_AGE_S = 5.0  # a frontend with an older state is not ready
MAX_LOADING = 100  # workers
MAX_WORD_CHARS = 200
_STORE_SENTENCES = {
    "ok": (logging.WARNING, "Redis has enough memory again: all requests are accepted."),
    "nearly_full": (
        logging.WARNING,
        "Redis has used 90 % of its memory (maxmemory): only small requests that store nothing are "
        "accepted. Raise maxmemory, or see the usage by tenant on the dashboard.",
    ),
    "full": (
        logging.ERROR,
        "Redis is out of memory (maxmemory): no request is accepted. Raise maxmemory, or see the "
        "usage by tenant on the dashboard.",
    ),
}


class HealthMonitor:
    """Keeps the last state of workers, queue and store. Empty until `refresh` has succeeded."""

    def __init__(
        self,
        store: SubmittingStore,
        registry: WorkerRegistry,
        deployment: Deployment,
        num_partitions: int = 1,
    ) -> None:
        self._num_partitions = num_partitions
        self._store = store
        self._registry = registry
        self._deployment = deployment
        self.workers: Sequence[WorkerStatus] = ()
        self.loading: Sequence[LoadingWorker] = ()  # that cannot serve yet
        self.queue: QueueStats | None = None
        self.redis_latency_s: float | None = None
        self.reachable = False
        self._taken_s: float | None = None
        self._store_state: StoreState = "ok"

    async def refresh(self) -> None:
        """Reads the state. Raises TransportError; the old state stays, marked as unreachable."""
        try:
            latency_s = await self._store.ping()
            workers = await self._registry.workers()
            queue = await self._registry.queue_stats()
            reports = await self._deployment.reports(ProcessKind.LOADING, MAX_LOADING)
        except TransportError:
            self.reachable = False
            raise
        self.redis_latency_s, self.workers, self.queue = latency_s, workers, queue
        serving = {worker.worker_id for worker in workers}  # a last report outlives the loading
        self.loading = [loading_worker(r) for r in reports if r.process_id not in serving]
        self.reachable = True
        self._taken_s = time.monotonic()
        if self.store_state != self._store_state:
            self._store_state = self.store_state
            level, sentence = _STORE_SENTENCES[self.store_state]
            used, limit = queue.store_used, queue.store_limit
            log.log(level, sentence, extra={"used_bytes": used, "maxmemory_bytes": limit})

    @property
    def age_s(self) -> float | None:
        return None if self._taken_s is None else time.monotonic() - self._taken_s

    @property
    def store_state(self) -> StoreState:
        """Returns ok, nearly_full (small requests that store nothing are accepted), or full."""
        if self.queue is None or not self.queue.store_limit:
            return "ok"
        used = self.queue.store_used / self.queue.store_limit
        return "full" if used >= 1 else "nearly_full" if used > 1 - RESERVED else "ok"

    @property
    def num_running(self) -> int:
        """Returns the number of jobs in an engine's batch: in prefill or decoding."""
        return num_running(self.workers)

    @property
    def num_waiting(self) -> int:
        """Returns the number of jobs that wait in the queue or at a worker."""
        queued = 0 if self.queue is None else self.queue.queued
        return queued + sum(
            _count(worker, "waiting") + _count(worker, "pending") for worker in self.workers
        )

    @property
    def num_by_status(self) -> dict[str, int]:
        """Returns the number of live workers by their status."""
        stalled = sum(worker.stalled for worker in self.workers)
        draining = sum(worker.draining and not worker.stalled for worker in self.workers)
        return {
            "ok": len(self.workers) - stalled - draining,
            "draining": draining,
            "stalled": stalled,
        }

    @property
    def status(self) -> HealthStatus:
        """Returns ok, stalled (an engine makes no steps), no_workers, or degraded (no store)."""
        if not self.is_fresh:
            return "degraded"
        if any(worker.stalled for worker in self.workers):
            return "stalled"
        return "ok" if self.workers else "no_workers"

    @property
    def paused(self) -> Mapping[str, Pause]:
        """Returns the queues that an operator has paused, by model."""
        return {} if self.queue is None else self.queue.paused

    @property
    def is_fresh(self) -> bool:
        """Whether the last refresh succeeded, at most MAX_AGE_S ago."""
        return self.reachable and (self.age_s or 0.0) <= MAX_AGE_S

    @property
    def partitions_up(self) -> dict[str, int]:
        """Returns by the number of each partition of Redis 1 if it answers, else 0."""
        away = frozenset() if self.queue is None else self.queue.away
        return {
            str(number): int(self.reachable and number not in away)
            for number in range(self._num_partitions)
        }

    def models(self) -> dict[str, ModelLoad]:
        """Returns the load of each announced model, by its name."""
        queued = {} if self.queue is None else self.queue.queued_by_model
        served = [model for worker in self.workers for model in worker.models]
        loads = {
            name: ModelLoad(waiting=queued.get(name, 0), workers=served.count(name))
            for name in sorted({*queued, *served})
        }
        for name in loads.keys() & self.paused.keys():
            loads[name].paused_since = self.paused[name].since_ms / 1000
            loads[name].paused_by = self.paused[name].by
        return loads

    def figures(self) -> dict[str, int]:
        """Returns what this frontend adds to the deployment's history: shared.transport's Sample.
        Nothing while the state is not fresh."""
        if self.queue is None or not self.is_fresh:
            return {}
        total = sum(_count(worker, "total_blocks") for worker in self.workers)
        free = sum(_count(worker, "free_blocks") for worker in self.workers)
        figures = {
            "age_s": round(max(self.queue.queue_age_s.values(), default=0.0)),
            "used": self.queue.store_used,
            "limit": self.queue.store_limit,
        }
        return {**figures, "kv": 1000 * (total - free) // total} if total else figures

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
                "memory": self.store_state,
                "used_bytes": 0 if self.queue is None else self.queue.store_used,
                "max_bytes": 0 if self.queue is None else self.queue.store_limit,
            },
            age_ms=_milliseconds(self.age_s),
            workers=[worker_object(worker) for worker in self.workers],
            loading=list(self.loading),
        )

    def report_to_tenants(self) -> Health:
        """Returns the body of GET /health without an operator's key: nothing of other tenants."""
        models = {}
        for name, load in self.models().items():
            models[name] = ModelLoad(workers=load.workers)
            if load.paused_since is not None:
                models[name].paused_since = load.paused_since
        return Health(status=self.status, models=models, loading=list(self.loading))


def num_running(workers: Iterable[WorkerStatus]) -> int:
    """Returns the number of jobs in the batches of these workers' engines."""
    return sum(_count(worker, "prefilling") + _count(worker, "active") for worker in workers)


def tokens_per_s(workers: Iterable[WorkerStatus]) -> float:
    """Returns the output tokens per second of these workers, as of their last heartbeats."""
    rates = (worker.stats.get("tok_s", 0.0) for worker in workers)
    return round(sum(rate for rate in rates if isinstance(rate, float)), 1)


def worker_object(worker: WorkerStatus) -> dict[str, Any]:
    """Returns a live worker as GET /health has it."""
    counts = {
        name: _count(worker, name)
        for name in ("step", "waiting", "prefilling", "active", "pending")
    }
    others = {name: _plain(value) for name, value in worker.stats.items() if name not in counts}
    return {
        "id": worker.worker_id,
        "status": "stalled" if worker.stalled else "draining" if worker.draining else "ok",
        "models": worker.models,
        "order": worker.order,  # null: of a release that reads none
        **counts,
        **others,
        "beat_age_ms": _milliseconds(worker.heartbeat_age_s),
    }


def loading_worker(report: ProcessReport) -> LoadingWorker:
    """Returns the status of a worker that loads its model; unknown values are cut short."""
    percent = report.stats.get("percent", "")[:3]
    return LoadingWorker(
        id=report.process_id[:MAX_WORD_CHARS],
        model=report.stats.get("model", "")[:MAX_WORD_CHARS],
        stage=report.stats.get("stage", "")[:MAX_WORD_CHARS],
        percent=min(int(percent), 100) if percent.isascii() and percent.isdigit() else 0,
        report_age_ms=round(report.age_s * 1000),
    )


def _count(worker: WorkerStatus, name: str) -> int:
    value = worker.stats.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _plain(value: float | str) -> float | int | str:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


HealthDep = Annotated[HealthMonitor, provided(HealthMonitor)]


@router.get("/health", response_model=Health, responses=errors(KEYED), operation_id="health_get")
@router.head(
    "/health", response_class=Response, responses=statuses(KEYED), operation_id="health_head"
)
async def health(caller: CallerDep, monitor: HealthDep) -> Response:
    """Returns 200 while this process runs. `status` is the deployment's state. Where keys are
    configured, models and what loads need a key, and the rest an operator's."""
    if caller.is_operator:
        report = monitor.report()
    elif caller.is_known:
        report = monitor.report_to_tenants()
    else:
        report = Health(status=monitor.status)
    return json_response(report.model_dump(exclude_unset=True))


@router.get(
    "/ready",
    response_model=Readiness,
    operation_id="ready_get",
    responses={**errors(FREE), 503: {"model": Readiness, "description": _NOT_READY}},
)
@router.head(
    "/ready",
    response_class=Response,
    responses=statuses(FREE | {503}),
    operation_id="ready_head",
)
async def ready(
    monitor: HealthDep, generation: GenerationDep, open_requests: OpenRequestsDep
) -> Response:
    """Returns 200 when new requests are accepted, else 503: no model is known, Redis is unreachable
    or full, or the frontend shuts down. Requests for `unserved` models wait for a worker."""
    known = generation.models.known
    is_ready = (
        open_requests.closed is None
        and monitor.is_fresh
        and bool(known)
        and monitor.store_state != "full"
    )
    readiness = Readiness(
        ready=is_ready,
        closed=open_requests.closed,
        status=monitor.status,
        store=monitor.store_state,
        models=list(known),
        unserved=[name for name, model in known.items() if not model.is_served],
    )
    response = json_response(readiness.model_dump(), 200 if is_ready else 503)
    if not is_ready:
        response.headers["retry-after"] = "1"
    return response


@router.get("/version", response_model=Version, responses=errors(KEYED))
async def release() -> Response:
    """Returns the release of this frontend, in vLLM's shape."""
    return json_response(Version(version=_VERSION))
