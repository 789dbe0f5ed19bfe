"""Metrics of a frontend: the tables of exposed metrics, and its counters.

GET /metrics has the counts of this process, so that frontends can be added up.
GET /metrics/deployment has the values of the whole deployment, which are the same at every
frontend: scrape one of them, for example through the load balancer.
"""

from __future__ import annotations

import collections
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
            "Generations, by outcome.",
        ),
        MetricRow(
            "penstock:batch_rows_total",
            "counter",
            ("outcome",),
            "Batch rows, by outcome: completed or failed.",
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
            (*_OF_REQUESTS, "prompt"),
            "Time from submit to the first token. A prompt of up to 1,024 tokens is short, of up "
            "to 8,192 medium, else long.",
            True,
        ),
        MetricRow(
            "penstock:inter_token_latency_seconds",
            "histogram",
            _OF_REQUESTS,
            "Time between deltas of a job.",
            True,
        ),
        MetricRow(
            "penstock:e2e_request_latency_seconds",
            "histogram",
            _OF_REQUESTS,
            "Time from submit to the last token.",
            True,
        ),
        MetricRow(
            "penstock:response_prompt_tokens_total",
            "counter",
            ("model_name",),
            "Prompt tokens of jobs that ended at this frontend.",
        ),
        MetricRow(
            "penstock:response_generation_tokens_total",
            "counter",
            ("model_name",),
            "Tokens sent to clients by this frontend.",
        ),
        MetricRow(
            "penstock:models", "gauge", (), "Models that a request to this frontend can name."
        ),
        MetricRow("penstock:streams_open", "gauge", (), "Responses in progress at this frontend."),
        MetricRow(
            "penstock:relay_resyncs_total",
            "counter",
            (),
            "Confirmed (re)subscriptions and overflows.",
        ),
        MetricRow(
            "penstock:relay_gaps_total", "counter", (), "Live frames that arrived after a gap."
        ),
        MetricRow(
            "penstock:relay_overlaps_total",
            "counter",
            (),
            "Deltas that overlapped with tokens already sent.",
        ),
        MetricRow(
            "penstock:relay_idle_reads_total",
            "counter",
            (),
            "Reads of the log to check an idle stream.",
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
            "Cancels that Redis has not confirmed yet.",
        ),
        MetricRow(
            "penstock:pot_used",
            "gauge",
            ("pot",),
            "Use of a resource that tenants share on this frontend, in slots or bytes.",
        ),
        MetricRow(
            "penstock:pot_limit",
            "gauge",
            ("pot",),
            "Limit of the shared resource, for all tenants.",
        ),
        MetricRow(
            "penstock:pot_refused_total",
            "counter",
            ("pot",),
            "Requests refused because a tenant's share (429) or the resource (503) was full.",
        ),
        MetricRow("penstock:redis_latency_seconds", "gauge", (), "Last round trip to Redis."),
        MetricRow("penstock:redis_up", "gauge", (), "1 if the last read from Redis succeeded."),
        MetricRow(
            "penstock:partition_up",
            "gauge",
            ("partition",),
            "1 if the partition of Redis answers this frontend, else 0: its jobs wait. 0 is the "
            "only one unless PENSTOCK_PARTITIONS is set.",
        ),
    )
)
DEPLOYMENT_METRICS = MetricTable(
    (
        MetricRow(
            "penstock:queue_depth",
            "gauge",
            ("model_name",),
            "Jobs waiting in the queue, also while no worker serves the model.",
        ),
        MetricRow(
            "penstock:queue_age_seconds",
            "gauge",
            ("model_name",),
            "Age of the next job in the queue: the oldest one if all have the same timeout. 0 if "
            "the queue is empty.",
        ),
        MetricRow(
            "penstock:queue_paused",
            "gauge",
            ("model_name",),
            "1 while an operator has paused the model's queue, else 0.",
        ),
        MetricRow(
            "penstock:queued_prompt_tokens", "gauge", (), "Prompt tokens of the jobs in the queue."
        ),
        MetricRow("penstock:jobs_running", "gauge", (), "Jobs running on a worker."),
        MetricRow(
            "penstock:partition_jobs",
            "gauge",
            ("partition", "state"),
            "Jobs of each partition of Redis: queued or running. As they were last while it does "
            "not answer.",
        ),
        MetricRow(
            "penstock:partition_commands_total",
            "counter",
            ("partition",),
            "Commands that the partition's server has processed since its start; partitions of "
            "one server have the same.",
        ),
        MetricRow("penstock:jobs_ended_total", "counter", ("state",), "Jobs, by terminal state."),
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
            "Bytes that Redis may use (maxmemory); 0 if unlimited.",
        ),
        MetricRow(
            "penstock:store_disk_ok",
            "gauge",
            ("write",),
            "1 if the last write of Redis to its disk succeeded: aof_write, aof_rewrite or "
            "rdb_save. 0 if it failed: the disk is full or broken.",
        ),
        MetricRow(
            "penstock:store_aof_enabled",
            "gauge",
            (),
            "1 if Redis keeps an append-only file; without one a restart loses jobs.",
        ),
        MetricRow("penstock:store_aof_bytes", "gauge", (), "Size of Redis' append-only file."),
        MetricRow(
            "penstock:tenant_cpu_seconds_total",
            "counter",
            ("tenant",),
            "CPU seconds of templates, JSON, tokenization, grammars and masks, for the 16 "
            "tenants that used most.",
        ),
        MetricRow(
            "penstock:tenant_refused_total",
            "counter",
            ("tenant",),
            "Requests refused for the tenant's limit (429) or the deployment's (503), for the 16 "
            "tenants with most.",
        ),
        MetricRow(
            "penstock:workers", "gauge", ("status",), "Live workers: ok, draining or stalled."
        ),
        MetricRow(
            "penstock:model_workers",
            "gauge",
            ("model_name",),
            "Live workers that serve a model; 0 if no worker serves it now.",
        ),
        MetricRow(
            "penstock:device_failures",
            "gauge",
            (),
            "Device failures of live workers since their start.",
        ),
    )
)
_SIZES = ((1024, "short"), (8192, "medium"))  # tokens of a prompt
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
        self._ttft_s = self._histogram("penstock:time_to_first_token_seconds")
        self.inter_token_s = self._histogram("penstock:inter_token_latency_seconds")
        self.e2e_s = self._histogram("penstock:e2e_request_latency_seconds")
        self.prompt_tokens = self._counter("penstock:response_prompt_tokens_total")
        self.generation_tokens = self._counter("penstock:response_generation_tokens_total")
        self.disconnects = self._counter("penstock:disconnects_total")
        self.cancels_by_request = 0
        self.accounts = Accounts()
        # Responses since the last report: `unavailable` (503), and other `errors` from 500 up.
        self.server_errors: collections.Counter[str] = collections.Counter()

    def first_token(self, kind: str, model: str, num_prompt_tokens: int, ttft_s: float) -> None:
        """Observes the time to a job's first token: long prompts have a bucket of their own."""
        size = next((name for limit, name in _SIZES if num_prompt_tokens <= limit), "long")
        self._ttft_s.labels(kind, model, size).observe(ttft_s)

    @property
    def exposition(self) -> Exposition:
        """The metrics of this frontend."""
        return Exposition(METRICS, self.registry, self._names)

    @property
    def deployment_exposition(self) -> Exposition:
        """The metrics of the whole deployment."""
        return Exposition(DEPLOYMENT_METRICS, self.deployment_registry, self._names)

    def _counter(self, name: str) -> Counter:
        return METRICS.counter(name, self.registry)

    def _histogram(self, name: str) -> Histogram:
        return METRICS.histogram(name, self.registry, _SECONDS)


MetricsDep = Annotated[Metrics, provided(Metrics)]
