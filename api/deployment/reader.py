"""DeploymentReader: reads the data of the views, each list once for all views that show it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from api.auth.keys import LIMITS, KeyRing
from api.batches.protocol import BatchObject
from api.deployment.history import Histories
from api.deployment.view import Content, Rows, ViewKey
from api.generation.models import ModelCatalog
from api.http.caller import DEFAULT_TENANT
from api.jobs.protocol import DeadLetterObject, JobObject, ListedJobs, estimated_wait_s
from api.system.health import HealthMonitor, num_running, tokens_per_s, worker_object
from api.system.metrics import MAX_HOLDERS, PotReport
from api.system.protocol import LoadingWorker, status_of
from shared.messages import JobState
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.batches import BatchStore
from shared.transport.ports.dead_letters import DeadLetters, Requeued
from shared.transport.ports.deployment import Deployment, ProcessKind, ProcessReport, TenantLoad
from shared.transport.ports.job_search import JobSearch
from shared.transport.ports.jobs import JobStore
from shared.transport.ports.registry import QueueStats, WorkerStatus

MAX_JOBS = 50
MAX_SEARCHED = 1000  # jobs looked at for one list, in each round
MAX_DEAD_LETTERS = 50
MAX_BATCHES = 50
MAX_TENANTS = 50
MAX_TENANTS_READ = 1000
MAX_WORKERS = 100
MAX_MODELS = 100
MAX_FRONTENDS = 100
MAX_POTS = 100  # the fullest
POTS = "pots"  # the member of a frontend's report with its pots, as JSON
SLOW_S = 2.0  # for which what changes seldom is not read again

Limits = Callable[[str], AdmissionLimits]
# Fields of a frontend's report, in which everything is text.
_COUNTS = frozenset({"port", "pid", "started_at", "streams", "dashboards"})
# Fields of GET /health that the dashboard shows, since most of the others change in every round.
_WORKER_FIELDS = (
    "id",
    "status",
    "models",
    "order",
    "engine",
    "engine_version",
    "step",
    "running",
    "waiting",
    "tok_s",
    "total_blocks",
    "free_blocks",
    "cached_blocks",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "model_swaps",
    "model_load_error",
    "lane_preemptions",
    "beat_age_ms",
)
# For callers without an operator's key: a worker's other numbers show what its tenants do.
_WORKER_FIELDS_OF_ALL = ("id", "status", "models", "engine", "engine_version", "beat_age_ms")


class DeploymentReader:
    """Call `begin_round`, then `content` for each view."""

    def __init__(
        self,
        store: JobStore,
        search: JobSearch,
        dead_letters: DeadLetters,
        batches: BatchStore,
        deployment: Deployment,
        health: HealthMonitor,
        catalog: ModelCatalog,
        ring: KeyRing,
        limits: Limits,
    ) -> None:
        """`limits`: of a tenant."""
        self._store = store
        self._search = search
        self._dead_letters = dead_letters
        self._batches = batches
        self._deployment = deployment
        self._health = health
        self._catalog = catalog
        self._ring = ring
        self._limits = limits
        self._histories = Histories(deployment)
        self._read: dict[tuple[str, Any], tuple[float, Rows]] = {}
        self._oldest_s = 0.0
        self._reports: tuple[float, Sequence[ProcessReport]] | None = None  # with when

    def begin_round(self) -> None:
        """Clears the data that each round reads anew."""
        self._oldest_s = time.monotonic() - SLOW_S
        self._read = {key: kept for key, kept in self._read.items() if kept[0] >= self._oldest_s}

    def service(
        self, key: ViewKey, load: TenantLoad | None = None, *, is_read: bool
    ) -> dict[str, Any]:
        """Returns the state of the deployment. `is_read`: the lists beside it were read just now.
        `load`: the tenant's own numbers, which a caller without an operator's key sees."""
        health = self._health
        report = health.report()
        workers = health.workers
        if not key.is_operator:
            own: dict[str, Any] = {
                "status": report.status if is_read else "degraded",
                "is_operator": False,
                "now": round(time.time(), 1),
                "workers": len(workers),
            }
            if load is not None:
                own["running"], own["waiting"] = load.running, load.queued
                own["queued_tokens"] = load.queued_tokens
            return own
        return {
            "status": report.status if is_read else "degraded",
            "is_operator": True,
            "states": _states(health.queue),
            "paused_queues": 0 if health.queue is None else len(health.queue.paused),
            "now": round(time.time(), 1),
            # By the jobs' states, as the rows: no worker counts those whose worker is lost.
            "running": 0 if health.queue is None else health.queue.running,
            "waiting": 0 if health.queue is None else health.queue.queued,
            "queued_tokens": report.queued_tokens,
            "tokens_per_s": tokens_per_s(workers),
            "workers": len(workers),
            "dead_letters": 0 if health.queue is None else health.queue.dead_letters,
            "redis": report.redis,
        }

    async def content(self, key: ViewKey) -> Content:
        """Returns the data of a view. Raises TransportError."""
        if key.job_id is not None:
            return await self._job_content(key, key.job_id)
        scope = key.scope
        jobs = await self._search.find(key.jobs, MAX_JOBS, max_searched=MAX_SEARCHED)
        known = self._catalog.known
        lists: dict[str, Rows] = {
            "workers": self._worker_rows(key),
            "models": self._model_rows(key),
            "jobs": [(record.job_id, JobObject.of(record, known)) for record in jobs.records],
        }
        slow: dict[str, tuple[Any, Callable[[], Awaitable[Rows]]]] = {
            "dead_letters": (scope, lambda: self._dead_letter_rows(scope)),
            "batches": ((scope, key.tenant), lambda: self._batch_rows(scope, key.tenant)),
            "tenants": (scope, lambda: self._tenant_rows(scope)),
        }
        if key.is_operator:
            if self._health.queue is not None and self._health.queue.partitions:
                lists["partitions"] = _partition_rows(self._health.queue)
            slow["frontends"] = (None, self._frontend_rows)
            slow["pots"] = (None, self._pot_rows)
            if key.history != "none":
                history = self._histories.day if key.history == "day" else self._histories.hour
                slow["history"] = (key.history, history)
        for name, (of, read) in slow.items():
            lists[name] = await self._slowly((name, of), read)
        load = None
        if not key.is_operator:
            (load,) = await self._deployment.tenants([key.tenant])
        objects: dict[str, Any] = {
            "service": self.service(key, load, is_read=True),
            "listed": ListedJobs.of(jobs),
        }
        return Content(objects, lists)

    def _worker_rows(self, key: ViewKey) -> Rows:
        """Returns the workers that serve, and those that are loading, in the same shape."""
        fields = _WORKER_FIELDS if key.is_operator else _WORKER_FIELDS_OF_ALL
        serving = [(worker.worker_id, _worker(worker, fields)) for worker in self._health.workers]
        loading = [(worker.id, _loading(worker)) for worker in self._health.loading]
        return [*serving, *loading][:MAX_WORKERS]

    def _model_rows(self, key: ViewKey) -> Rows:
        """Returns the models that requests can name, and those that have jobs or workers."""
        known, loads, queue = self._catalog.known, self._health.models(), self._health.queue
        rows: list[tuple[str, dict[str, Any]]] = []
        for name in sorted({*known, *loads})[:MAX_MODELS]:
            load = loads.get(name)
            num_workers = load.workers if load else 0
            row: dict[str, Any] = {
                "model": name,
                "workers": num_workers,
                "is_served": num_workers > 0,
                "is_paused": load is not None and load.paused_since is not None,
            }
            if name in known:
                row["load_failed"] = known[name].load_failed
            if num_workers == 0 and name in known:
                row["status"] = status_of(known[name])
                row["estimated_wait_s"] = estimated_wait_s(known[name])
            if key.is_operator:
                serving = [worker for worker in self._health.workers if name in worker.models]
                row["queued"] = load.waiting or 0 if load else 0
                row["queue_age_s"] = round(queue.queue_age_s.get(name, 0.0)) if queue else 0
                row["running"] = num_running(serving)
                row["tokens_per_s"] = tokens_per_s(serving)
            rows.append((name, row))
        return rows

    async def _slowly(self, key: tuple[str, Any], read: Callable[[], Awaitable[Rows]]) -> Rows:
        kept = self._read.get(key)
        if kept is None:
            kept = self._read[key] = (time.monotonic(), await read())
        return kept[1]

    async def _job_content(self, key: ViewKey, job_id: str) -> Content:
        record = await self._store.get(job_id)
        job = None if record is None else JobObject.of(record, self._catalog.known)
        dead_letter: dict[str, Any] | None = None
        if record is not None and record.state is JobState.FAILED:
            found = await self._dead_letters.get(job_id)
            if isinstance(found, Requeued):
                dead_letter = {"requeued_as": found.job_id}
            elif found is not None:
                dead_letter = {"requeued_as": None}
        service = self.service(key, is_read=True)
        return Content({"service": service, "job": job, "dead_letter": dead_letter})

    async def _dead_letter_rows(self, scope: str | None) -> Rows:
        found = await self._dead_letters.list(scope, MAX_DEAD_LETTERS)
        return [(letter.job_id, DeadLetterObject.of(letter)) for letter in found]

    async def _batch_rows(self, scope: str | None, tenant: str) -> Rows:
        """Returns the tenant's batches; to an operator also the open ones of other tenants."""
        found = {b.batch_id: b for b in await self._batches.list(tenant, None, MAX_BATCHES)}
        if scope is None:
            found |= {b.batch_id: b for b in await self._batches.list_open(MAX_BATCHES)}
        newest = sorted(found.values(), key=lambda batch: batch.created_ms, reverse=True)
        return [
            (batch.batch_id, {"tenant": batch.tenant, **BatchObject.of(batch).model_dump()})
            for batch in newest[:MAX_BATCHES]
        ]

    async def _tenant_rows(self, scope: str | None) -> Rows:
        """Returns the tenants with the most jobs."""
        names = [scope] if scope is not None else self._ring.tenants or [DEFAULT_TENANT]
        loads = await self._deployment.tenants(names[:MAX_TENANTS_READ])
        most = sorted(loads, key=lambda load: (-load.queued - load.running, load.tenant))
        return [(load.tenant, self._tenant(load, scope)) for load in most[:MAX_TENANTS]]

    def _tenant(self, load: TenantLoad, scope: str | None) -> dict[str, Any]:
        """Returns a tenant's load, limits and accounts; its share of what all use to operators."""
        limits, queue = self._limits(load.tenant), self._health.queue
        account = load.tenant if self._ring.tenants else ""  # without keys all have one account
        used_us = {} if queue is None else queue.cpu_us_by_tenant
        cpu_us, total_us = used_us.get(account, 0), sum(used_us.values())
        return {
            "tenant": load.tenant,
            "queued": load.queued,
            "running": load.running,
            "queued_tokens": load.queued_tokens,
            "cpu_s": round(cpu_us / 1e6, 3),
            "cpu_share": round(cpu_us / max(1, total_us), 3) if scope is None else None,
            "held_bytes": 0 if queue is None else queue.held_by_tenant.get(load.tenant, 0),
            "refused": 0 if queue is None else queue.refused_by_tenant.get(account, 0),
            "limits": {name: getattr(limits, member) for name, member in LIMITS.items()},
        }

    async def _frontend_rows(self) -> Rows:
        return [
            (
                report.process_id,
                {
                    "id": report.process_id,
                    "report_age_ms": round(report.age_s * 1000),
                    **{name: value for name, value in report.stats.items() if name != POTS},
                    **{name: int(report.stats[name]) for name in _COUNTS & report.stats.keys()},
                },
            )
            for report in await self._frontends()
        ]

    async def _pot_rows(self) -> Rows:
        """Returns the use of Redis and of each frontend by tenant, fullest first."""
        pots = [
            (report.process_id, pot)
            for report in await self._frontends()
            for pot in _pots(report.stats.get(POTS, ""))
        ]
        queue = self._health.queue
        if queue is not None and queue.store_limit:
            holders = list(queue.held_by_tenant.items())  # a refused submit writes nothing
            store = PotReport("store_bytes", queue.store_used, queue.store_limit, None, holders)
            pots.append(("Redis", store))
        pots.sort(key=lambda entry: entry[1].used / max(1, entry[1].limit or 0), reverse=True)
        if queue is not None:
            pots[:0] = [("all", account) for account in _accounts(queue)]
        ids = [(f"{frontend}/{pot.pot}", frontend, pot) for frontend, pot in pots[:MAX_POTS]]
        return [
            (name, {"id": name, "frontend": frontend, **msgspec.to_builtins(pot)})
            for name, frontend, pot in ids
        ]

    async def _frontends(self) -> Sequence[ProcessReport]:
        kept = self._reports
        if kept is None or kept[0] < self._oldest_s:
            found = await self._deployment.reports(ProcessKind.FRONTEND, MAX_FRONTENDS)
            kept = self._reports = (time.monotonic(), found)
        return kept[1]


def _states(queue: QueueStats | None) -> dict[str, int]:
    """Returns how many jobs are in each state; of those that have ended, all that ever did."""
    if queue is None:
        return {}
    return {"queued": queue.queued, "running": queue.running, **queue.totals}


def _partition_rows(queue: QueueStats) -> Rows:
    """Returns the partitions of Redis, those that are away as they were last."""
    return [
        (
            str(number),
            {
                "partition": number,
                "is_away": number in queue.away,
                "queued": part.queued,
                "running": part.running,
                "store_used": part.store_used,
                "store_limit": part.store_limit,
            },
        )
        for number, part in queue.partitions.items()
    ]


def _accounts(queue: QueueStats) -> Iterator[PotReport]:
    """Yields the use and the refusals of each tenant in the whole deployment."""
    cpu_s = {tenant: us // 1_000_000 for tenant, us in queue.cpu_us_by_tenant.items()}
    for name, by_tenant in (("cpu_seconds", cpu_s), ("refused_requests", queue.refused_by_tenant)):
        holders = list(islice(by_tenant.items(), MAX_HOLDERS))
        yield PotReport(name, sum(by_tenant.values()), None, None, holders)


def _pots(text: str) -> list[PotReport]:
    """Returns the pots of a frontend's report; none if another release wrote another format."""
    try:
        return msgspec.json.decode(text, type=list[PotReport])
    except msgspec.MsgspecError:
        return []


def _loading(worker: LoadingWorker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "status": "loading",
        "models": [worker.model],
        "stage": worker.stage,
        "percent": worker.percent,
        "beat_age_ms": worker.report_age_ms,
    }


def _worker(worker: WorkerStatus, fields: Sequence[str]) -> dict[str, Any]:
    found = worker_object(worker)
    return {name: found[name] for name in fields if name in found}
