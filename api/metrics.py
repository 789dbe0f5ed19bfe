"""Metrics of a frontend: the tables of what it exposes, and its counters.

GET /metrics has what this process saw, so that frontends can be added up. GET /metrics/deployment
has the values of the whole deployment, which are the same at every frontend: scrape one of them,
for example through the load balancer.
"""

from __future__ import annotations

from typing import Annotated

from prometheus_client import CollectorRegistry, Counter, Histogram

from api.dependencies import provided
from api.http.accounts import Accounts
from shared.metrics import Exposition, MetricRow, MetricsNames, MetricTable

_OF_REQUESTS = ("kind", "model_name")
METRICS = MetricTable(
    (
        MetricRow(
            "penstock:requests_total",
            "counter",
            ("kind", "outcome"),
            "Generations by how they ended.",
        ),
        MetricRow(
            "penstock:batch_rows_total",
            "counter",
            ("outcome",),
            "Rows of batches: completed, failed.",
        ),
        MetricRow(
            "penstock:http_responses_total",
            "counter",
            ("route", "method", "status"),
            "HTTP responses.",
        ),
        MetricRow(
            "penstock:time_to_first_token_seconds",
            "histogram",
            _OF_REQUESTS,
            "Submit to first token.",
            True,
        ),
        MetricRow(
            "penstock:inter_token_latency_seconds",
            "histogram",
            _OF_REQUESTS,
            "Between deltas of a job.",
            True,
        ),
        MetricRow(
            "penstock:e2e_request_latency_seconds",
            "histogram",
            _OF_REQUESTS,
            "Submit to last token.",
            True,
        ),
        MetricRow(
            "penstock:response_prompt_tokens_total",
            "counter",
            ("model_name",),
            "Prompt tokens of jobs that ended here.",
        ),
        MetricRow(
            "penstock:response_generation_tokens_total",
            "counter",
            ("model_name",),
            "Tokens that reached readers here.",
        ),
        MetricRow(
            "penstock:models", "gauge", (), "Models that requests to this frontend can name."
        ),
        MetricRow("penstock:streams_open", "gauge", (), "Responses in progress at this frontend."),
        MetricRow(
            "penstock:relay_resyncs_total",
            "counter",
            (),
            "Confirmed (re)subscriptions and overflows.",
        ),
        MetricRow("penstock:relay_gaps_total", "counter", (), "Live frames that came too early."),
        MetricRow(
            "penstock:relay_overlaps_total",
            "counter",
            (),
            "Deltas of which the reader had a part.",
        ),
        MetricRow(
            "penstock:relay_idle_reads_total",
            "counter",
            (),
            "Reads of the log after a look at a quiet stream.",
        ),
        MetricRow(
            "penstock:relay_read_errors_total", "counter", (), "Reads of the log that failed."
        ),
        MetricRow(
            "penstock:disconnects_total",
            "counter",
            ("kind",),
            "Clients that left before the end.",
        ),
        MetricRow(
            "penstock:cancels_total",
            "counter",
            ("cause",),
            "Cancels sent: disconnect or request.",
        ),
        MetricRow(
            "penstock:cancels_pending",
            "gauge",
            (),
            "Cancels that the store has not confirmed yet.",
        ),
        MetricRow(
            "penstock:pot_used",
            "gauge",
            ("pot",),
            "What tenants hold of what they share of this frontend: places or bytes.",
        ),
        MetricRow("penstock:pot_limit", "gauge", ("pot",), "The limit of it for all tenants."),
        MetricRow(
            "penstock:pot_refused_total",
            "counter",
            ("pot",),
            "Requests refused by it, for the tenant's share (429) or for all (503).",
        ),
        MetricRow("penstock:redis_latency_seconds", "gauge", (), "Last round trip to the store."),
        MetricRow(
            "penstock:redis_up", "gauge", (), "1 when the last look into the store succeeded."
        ),
    )
)
DEPLOYMENT_METRICS = MetricTable(
    (
        MetricRow(
            "penstock:queue_depth",
            "gauge",
            ("model_name",),
            "Jobs in the queue that no worker has taken, also while none serves the model.",
        ),
        MetricRow(
            "penstock:queue_age_seconds",
            "gauge",
            ("model_name",),
            "Since the submit of the job in the queue that is due next: the oldest where all have "
            "one timeout. 0: none waits.",
        ),
        MetricRow(
            "penstock:queued_prompt_tokens", "gauge", (), "Prompt tokens of the jobs in the queue."
        ),
        MetricRow("penstock:jobs_running", "gauge", (), "Jobs that a worker has taken."),
        MetricRow(
            "penstock:jobs_ended_total", "counter", ("state",), "Jobs by their terminal state."
        ),
        MetricRow(
            "penstock:dead_letters",
            "gauge",
            (),
            "Jobs that killed workers or engines, kept for an operator.",
        ),
        MetricRow("penstock:store_bytes", "gauge", (), "Bytes that Redis uses."),
        MetricRow(
            "penstock:store_bytes_max",
            "gauge",
            (),
            "Bytes that Redis may use (maxmemory); 0: it has no limit.",
        ),
        MetricRow(
            "penstock:tenant_cpu_seconds_total",
            "counter",
            ("tenant",),
            "Processor seconds of text, of the admission of grammars and of their masks, of the "
            "16 tenants that used most.",
        ),
        MetricRow(
            "penstock:tenant_refused_total",
            "counter",
            ("tenant",),
            "Requests refused for a limit of the tenant (429) or of all (503), of the 16 tenants "
            "with most.",
        ),
        MetricRow(
            "penstock:workers", "gauge", ("status",), "Live workers: ok, draining or stalled."
        ),
        MetricRow(
            "penstock:model_workers",
            "gauge",
            ("model_name",),
            "Live workers that serve a model; 0 for one that none serves now.",
        ),
        MetricRow(
            "penstock:device_failures",
            "gauge",
            (),
            "Devices' failures, of live workers since their start.",
        ),
    )
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters and histograms of one frontend, and its two expositions."""

    def __init__(self, names: MetricsNames) -> None:
        self.registry = CollectorRegistry()
        self.deployment_registry = CollectorRegistry()
        self._names = names
        self.requests = self._counter("penstock:requests_total")
        self.batch_rows = self._counter("penstock:batch_rows_total")
        self.http_responses = self._counter("penstock:http_responses_total")
        self.ttft_s = self._histogram("penstock:time_to_first_token_seconds")
        self.inter_token_s = self._histogram("penstock:inter_token_latency_seconds")
        self.e2e_s = self._histogram("penstock:e2e_request_latency_seconds")
        self.prompt_tokens = self._counter("penstock:response_prompt_tokens_total")
        self.generation_tokens = self._counter("penstock:response_generation_tokens_total")
        self.disconnects = self._counter("penstock:disconnects_total")
        self.cancels_by_request = 0
        self.accounts = Accounts()

    @property
    def exposition(self) -> Exposition:
        """What this frontend saw."""
        return Exposition(METRICS, self.registry, self._names)

    @property
    def deployment_exposition(self) -> Exposition:
        """What is known of the whole deployment."""
        return Exposition(DEPLOYMENT_METRICS, self.deployment_registry, self._names)

    def _counter(self, name: str) -> Counter:
        return METRICS.counter(name, self.registry)

    def _histogram(self, name: str) -> Histogram:
        return METRICS.histogram(name, self.registry, _SECONDS)


MetricsDep = Annotated[Metrics, provided(Metrics)]
