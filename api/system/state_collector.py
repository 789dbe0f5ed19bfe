"""StateCollector: the metrics that are read from state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.generation.models import ModelCatalog
from api.http.open_requests import OpenRequests
from api.jobs.disconnects import DisconnectTracker
from api.jobs.event_stream import RelayCounts
from api.metrics import gauge, labelled, total
from api.system.health_monitor import HealthMonitor


@dataclass(frozen=True, eq=False)
class StateCollector(Collector):
    """Reads gauges and totals from the parts of a frontend at each scrape."""

    health: HealthMonitor
    catalog: ModelCatalog
    requests: OpenRequests
    disconnects: DisconnectTracker
    relay: RelayCounts
    cancels_by_request: Callable[[], int]

    def collect(self) -> Iterable[Metric]:
        health, queue, relay = self.health, self.health.queue, self.relay
        yield gauge("penstock:num_requests_running", health.num_running)
        yield gauge("penstock:num_requests_waiting", health.num_waiting)
        depths = {model: load.waiting for model, load in health.models().items()}
        yield labelled("penstock:queue_depth", depths)
        yield gauge("penstock:queued_prompt_tokens", 0 if queue is None else queue.queued_tokens)
        yield labelled("penstock:workers", self._workers())
        failures = sum(float(w.stats.get("device_failures", 0)) for w in health.workers)
        yield gauge("penstock:device_failures", failures)
        yield gauge("penstock:models", len(self.catalog.known))
        yield labelled("penstock:jobs_ended_total", {} if queue is None else queue.totals)
        yield gauge("penstock:streams_open", len(self.requests))
        yield total("penstock:relay_resyncs_total", relay.resyncs)
        yield total("penstock:relay_gaps_total", relay.gaps)
        yield total("penstock:relay_overlaps_total", relay.overlaps)
        yield total("penstock:relay_idle_reads_total", relay.idle_reads)
        yield total("penstock:relay_read_errors_total", relay.read_errors)
        yield labelled(
            "penstock:cancels_total",
            {"disconnect": self.disconnects.num_cancelled, "request": self.cancels_by_request()},
        )
        yield gauge("penstock:cancels_pending", self.disconnects.num_pending)
        yield gauge("penstock:redis_latency_seconds", health.redis_latency_s or 0.0)
        yield gauge("penstock:redis_up", int(health.reachable))

    def _workers(self) -> dict[str, int]:
        """Returns the number of live workers by their status."""
        workers = self.health.workers
        stalled = sum(worker.stalled for worker in workers)
        draining = sum(worker.draining and not worker.stalled for worker in workers)
        return {"ok": len(workers) - stalled - draining, "draining": draining, "stalled": stalled}
