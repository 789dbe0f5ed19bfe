"""GET /metrics and /metrics/deployment, and the state that they read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import msgspec
from fastapi import APIRouter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from api.generation.models import ModelCatalog
from api.http.open_requests import OpenRequests
from api.http.openapi import KEYED, errors
from api.http.shares import Pot
from api.jobs.disconnects import DisconnectTracker
from api.jobs.event_stream import RelayCounts
from api.metrics import DEPLOYMENT_METRICS, METRICS, MetricsDep
from api.system.health import HealthMonitor
from shared.keys import HOME
from shared.metrics import CONTENT_TYPE, Exposition

router = APIRouter(tags=["Service"])


MAX_HOLDERS = 16  # of a pot that are shown


class PotReport(msgspec.Struct):
    """A pot as operators see it."""

    pot: str
    used: int
    limit: int | None  # None: it is counted, and has no limit
    refused: int | None  # None: not counted
    holders: list[tuple[str, int]]  # tenants with what they have, those with the most first


@dataclass(frozen=True, eq=False)
class FrontendCollector(Collector):
    """Reads gauges and totals from the parts of a frontend."""

    health: HealthMonitor
    catalog: ModelCatalog
    requests: OpenRequests
    disconnects: DisconnectTracker
    relay: RelayCounts
    cancels_by_request: Callable[[], int]
    pots: Sequence[Pot]

    def collect(self) -> Iterable[Metric]:
        value, values, relay = METRICS.value, METRICS.values, self.relay
        yield value("penstock:models", len(self.catalog.known))
        yield value("penstock:streams_open", len(self.requests))
        yield value("penstock:relay_resyncs_total", relay.resyncs)
        yield value("penstock:relay_gaps_total", relay.gaps)
        yield value("penstock:relay_overlaps_total", relay.overlaps)
        yield value("penstock:relay_idle_reads_total", relay.idle_reads)
        yield value("penstock:relay_read_errors_total", relay.read_errors)
        cancels = {
            "disconnect": self.disconnects.num_cancelled,
            "request": self.cancels_by_request(),
        }
        yield values("penstock:cancels_total", cancels)
        yield value("penstock:cancels_pending", self.disconnects.num_pending)
        pots = self.pots
        yield values("penstock:pot_used", {pot.name: pot.used for pot in pots})
        yield values("penstock:pot_limit", {pot.name: pot.limit for pot in pots})
        yield values("penstock:pot_refused_total", {pot.name: pot.num_refused for pot in pots})
        yield value("penstock:redis_latency_seconds", self.health.redis_latency_s or 0.0)
        yield value("penstock:redis_up", int(self.health.reachable))
        yield values("penstock:partition_up", self.health.partitions_up)


@dataclass(frozen=True, eq=False)
class DeploymentCollector(Collector):
    """Reads the state of the deployment, and nothing while that is not fresh: two frontends would
    report different values, and a counter that falls looks like a restart to Prometheus."""

    health: HealthMonitor

    def collect(self) -> Iterable[Metric]:
        health, queue = self.health, self.health.queue
        if queue is None or not health.is_fresh:
            return
        value, values = DEPLOYMENT_METRICS.value, DEPLOYMENT_METRICS.values
        models = health.models()
        yield values("penstock:queue_depth", {m: load.waiting or 0 for m, load in models.items()})
        ages_s = {model: queue.queue_age_s.get(model, 0.0) for model in models}
        yield values("penstock:queue_age_seconds", ages_s)
        paused = {model: int(model in health.paused) for model in models}
        yield values("penstock:queue_paused", paused)
        yield value("penstock:queued_prompt_tokens", queue.queued_tokens)
        yield value("penstock:jobs_running", queue.running)
        parts = (queue.partitions or {HOME: queue}).items()
        jobs = DEPLOYMENT_METRICS.family("penstock:partition_jobs")
        for number, part in parts:
            jobs.add_metric([str(number), "queued"], part.queued)
            jobs.add_metric([str(number), "running"], part.running)
        yield jobs
        commands = {str(number): part.store_commands for number, part in parts}
        yield values("penstock:partition_commands_total", commands)
        yield values("penstock:jobs_ended_total", queue.totals)
        yield value("penstock:dead_letters", queue.dead_letters)
        yield value("penstock:store_bytes", queue.store_used)
        yield value("penstock:store_bytes_max", queue.store_limit)
        disk = queue.disk
        writes = {n.removeprefix("ok_"): is_ok for n, is_ok in disk.items() if n.startswith("ok_")}
        yield values("penstock:store_disk_ok", writes)
        yield value("penstock:store_aof_enabled", disk.get("aof", 0))
        yield value("penstock:store_aof_bytes", disk.get("aof_bytes", 0))
        used_us = islice(queue.cpu_us_by_tenant.items(), MAX_HOLDERS)
        used_s = {tenant: cpu_us / 1e6 for tenant, cpu_us in used_us}
        yield values("penstock:tenant_cpu_seconds_total", used_s)
        refused = dict(islice(queue.refused_by_tenant.items(), MAX_HOLDERS))
        yield values("penstock:tenant_refused_total", refused)
        yield values("penstock:workers", health.num_by_status)
        workers = {model: load.workers for model, load in models.items()}
        yield values("penstock:model_workers", workers)
        failures = sum(float(w.stats.get("device_failures", 0)) for w in health.workers)
        yield value("penstock:device_failures", failures)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **errors(KEYED)},
)
async def metrics(counters: MetricsDep) -> Response:
    """Returns what this frontend saw, in the Prometheus text format. docs/METRICS.md has the
    table."""
    return _response(counters.exposition)


@router.get(
    "/metrics/deployment",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **errors(KEYED)},
)
async def deployment_metrics(counters: MetricsDep) -> Response:
    """Returns the metrics of the whole deployment, in the Prometheus text format. Every frontend
    returns the same: scrape one address that any of them answers."""
    return _response(counters.deployment_exposition)


def _response(exposition: Exposition) -> Response:
    return Response(exposition.text(), media_type=CONTENT_TYPE)


def pot_report(pot: Pot) -> PotReport:
    """Returns a pot with the tenants that have the most of it. Without keys there is no tenant to
    name."""
    by_tenant: dict[str, int] = {}
    for of, amount in pot.held.items():
        name = "" if of is None else of.tenant
        by_tenant[name] = by_tenant.get(name, 0) + amount
    holders = nlargest(MAX_HOLDERS, by_tenant.items(), key=lambda item: item[1])
    return PotReport(pot.name, pot.used, pot.limit, pot.num_refused, holders)
