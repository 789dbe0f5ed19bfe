"""Metrics: the table of everything that GET /metrics exposes, and its counters.

Names follow vLLM's where it has one. Gauges are read from state at each scrape
(`api.system.health`), never counted up and down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from api.dependencies import provided

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
    ("penstock:http_responses_total", "counter", ("route", "method", "status"), "HTTP responses."),
    ("penstock:time_to_first_token_seconds", "histogram", ("kind",), "Submit to first token."),
    ("penstock:inter_token_latency_seconds", "histogram", ("kind",), "Between deltas of a job."),
    ("penstock:e2e_request_latency_seconds", "histogram", ("kind",), "Submit to last token."),
    ("penstock:prompt_tokens_total", "counter", (), "Prompt tokens of jobs that ended here."),
    ("penstock:generation_tokens_total", "counter", (), "Tokens that reached readers here."),
    ("penstock:streams_open", "gauge", (), "Responses in progress at this frontend."),
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
    ("penstock:cancels_pending", "gauge", (), "Cancels that the store has not confirmed yet."),
    ("penstock:redis_latency_seconds", "gauge", (), "Last round trip to the store."),
    ("penstock:redis_up", "gauge", (), "1 when the last look into the store succeeded."),
)
_KINDS = {name: (kind, labels, meaning) for name, kind, labels, meaning in METRICS}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters and histograms of one frontend."""

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
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        kind, labels, meaning = _KINDS[name]
        assert kind == "counter"
        return Counter(name.removesuffix("_total"), meaning, labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        kind, labels, meaning = _KINDS[name]
        assert kind == "histogram"
        return Histogram(name, meaning, labels, registry=self.registry, buckets=_SECONDS)


def gauge(name: str, value: float) -> Metric:
    """Returns a gauge of METRICS without labels."""
    return GaugeMetricFamily(name, _KINDS[name][2], value=value)


def total(name: str, value: float) -> Metric:
    """Returns a counter of METRICS without labels."""
    return CounterMetricFamily(name.removesuffix("_total"), _KINDS[name][2], value=value)


def labelled(name: str, values: Mapping[str, float]) -> Metric:
    """Returns a gauge or counter of METRICS that has one label, with its values by that label."""
    kind, labels, meaning = _KINDS[name]
    family = (
        GaugeMetricFamily(name, meaning, labels=labels)
        if kind == "gauge"
        else CounterMetricFamily(name.removesuffix("_total"), meaning, labels=labels)
    )
    for label, value in values.items():
        family.add_metric([label], value)
    return family


MetricsDep = Annotated[Metrics, provided(Metrics)]
