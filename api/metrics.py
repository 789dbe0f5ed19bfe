"""Metrics: the table of everything GET /metrics says, and the objects that count it.

Names follow vLLM's where it has one. Gauges are read from state when they are scraped, never
counted up and down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.generation.models import ModelCatalog
from api.http.open_requests import OpenRequests
from api.jobs.disconnects import Departures
from api.jobs.event_stream import RelayCounts
from api.system.health_monitor import HealthMonitor

# name, kind, labels, meaning
METRICS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("penstock:num_requests_running", "gauge", (), "Jobs in prefill or decoding, all workers."),
    ("penstock:num_requests_waiting", "gauge", (), "Jobs waiting, in the queue or at a worker."),
    (
        "penstock:queue_depth",
        "gauge",
        ("model",),
        "Jobs in the queue that no worker has taken, also while none serves the model.",
    ),
    ("penstock:queued_prompt_tokens", "gauge", (), "Prompt tokens of the jobs in the queue."),
    ("penstock:workers", "gauge", ("status",), "Live workers: ok, draining or stalled."),
    ("penstock:device_failures", "gauge", (), "Devices' failures, of live workers since start."),
    ("penstock:models", "gauge", (), "Models that requests to this frontend can name."),
    (
        "penstock:jobs_ended_total",
        "counter",
        ("state",),
        "Jobs by terminal state, deployment-wide.",
    ),
    ("penstock:requests_total", "counter", ("kind", "outcome"), "Generations by how they ended."),
    ("penstock:batch_rows_total", "counter", ("outcome",), "Rows of batches: completed, failed."),
    ("penstock:http_responses_total", "counter", ("route", "method", "status"), "HTTP answers."),
    ("penstock:time_to_first_token_seconds", "histogram", ("kind",), "Submit to first token."),
    ("penstock:inter_token_latency_seconds", "histogram", ("kind",), "Between deltas of a job."),
    ("penstock:e2e_request_latency_seconds", "histogram", ("kind",), "Submit to last token."),
    ("penstock:prompt_tokens_total", "counter", (), "Prompt tokens of jobs that ended here."),
    ("penstock:generation_tokens_total", "counter", (), "Tokens that reached readers here."),
    ("penstock:streams_open", "gauge", (), "Answers in progress at this frontend."),
    ("penstock:relay_resyncs_total", "counter", (), "Confirmed (re)subscriptions and overflows."),
    ("penstock:relay_gaps_total", "counter", (), "Live frames that came too early."),
    ("penstock:relay_overlaps_total", "counter", (), "Deltas of which the reader had a part."),
    (
        "penstock:relay_idle_reads_total",
        "counter",
        (),
        "Reads of the log after a look at a quiet stream.",
    ),
    ("penstock:relay_read_errors_total", "counter", (), "Reads of the log that failed."),
    ("penstock:disconnects_total", "counter", ("kind",), "Clients that left before the end."),
    ("penstock:cancels_total", "counter", ("cause",), "Cancels sent: disconnect or request."),
    ("penstock:cancels_pending", "gauge", (), "Cancels that the store has not heard yet."),
    ("penstock:redis_latency_seconds", "gauge", (), "Last round trip to the store."),
    ("penstock:redis_up", "gauge", (), "1 when the last look into the store succeeded."),
)
_KINDS = {name: (kind, labels, meaning) for name, kind, labels, meaning in METRICS}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What is counted as it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("penstock:requests_total")
        self.batch_rows = self._counter("penstock:batch_rows_total")
        self.http_responses = self._counter("penstock:http_responses_total")
        self.ttft_s = self._histogram("penstock:time_to_first_token_seconds")
        self.inter_token_s = self._histogram("penstock:inter_token_latency_seconds")
        self.e2e_s = self._histogram("penstock:e2e_request_latency_seconds")
        self.prompt_tokens = self._counter("penstock:prompt_tokens_total")
        self.generation_tokens = self._counter("penstock:generation_tokens_total")
        self.disconnects = self._counter("penstock:disconnects_total")
        self.cancels_by_request = 0

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        kind, labels, meaning = _KINDS[name]
        assert kind == "counter"
        return Counter(name.removesuffix("_total"), meaning, labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        kind, labels, meaning = _KINDS[name]
        assert kind == "histogram"
        return Histogram(name, meaning, labels, registry=self.registry, buckets=_SECONDS)


@dataclass(frozen=True, eq=False)
class StateCollector(Collector):
    """What is read from the rooms when somebody scrapes."""

    health: HealthMonitor
    catalog: ModelCatalog
    requests: OpenRequests
    departures: Departures
    relay: RelayCounts
    cancels_by_request: Callable[[], int]

    def collect(self) -> Iterable[Metric]:
        health, queue, relay = self.health, self.health.queue, self.relay
        yield _gauge("penstock:num_requests_running", health.num_running)
        yield _gauge("penstock:num_requests_waiting", health.num_waiting)
        yield self._queue_depth()
        yield _gauge("penstock:queued_prompt_tokens", 0 if queue is None else queue.queued_tokens)
        yield self._workers()
        failures = sum(float(w.stats.get("device_failures", 0)) for w in health.workers)
        yield _gauge("penstock:device_failures", failures)
        yield _gauge("penstock:models", len(self.catalog.known))
        yield _totals(
            "penstock:jobs_ended_total", {} if queue is None else dict(queue.totals.items())
        )
        yield _gauge("penstock:streams_open", len(self.requests))
        yield _total("penstock:relay_resyncs_total", relay.resyncs)
        yield _total("penstock:relay_gaps_total", relay.gaps)
        yield _total("penstock:relay_overlaps_total", relay.overlaps)
        yield _total("penstock:relay_idle_reads_total", relay.idle_reads)
        yield _total("penstock:relay_read_errors_total", relay.read_errors)
        yield _totals(
            "penstock:cancels_total",
            {"disconnect": self.departures.num_cancelled, "request": self.cancels_by_request()},
        )
        yield _gauge("penstock:cancels_pending", self.departures.num_pending)
        yield _gauge("penstock:redis_latency_seconds", health.redis_latency_s or 0.0)
        yield _gauge("penstock:redis_up", int(health.reachable))

    def _queue_depth(self) -> Metric:
        name = "penstock:queue_depth"
        family = GaugeMetricFamily(name, _KINDS[name][2], labels=["model"])
        for model, counts in self.health.models().items():
            family.add_metric([model], counts["waiting"])
        return family

    def _workers(self) -> Metric:
        family = GaugeMetricFamily(
            "penstock:workers", _KINDS["penstock:workers"][2], labels=["status"]
        )
        workers = self.health.workers
        stalled = sum(worker.stalled for worker in workers)
        draining = sum(worker.draining and not worker.stalled for worker in workers)
        family.add_metric(["ok"], len(workers) - stalled - draining)
        family.add_metric(["draining"], draining)
        family.add_metric(["stalled"], stalled)
        return family


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, _KINDS[name][2], value=value)


def _total(name: str, value: float) -> Metric:
    return CounterMetricFamily(name.removesuffix("_total"), _KINDS[name][2], value=value)


def _totals(name: str, values: dict[str, int]) -> Metric:
    _, labels, meaning = _KINDS[name]
    family = CounterMetricFamily(name.removesuffix("_total"), meaning, labels=labels)
    for label, value in values.items():
        family.add_metric([label], value)
    return family
