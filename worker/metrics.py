"""Metrics of one worker: the table of all that it exposes, and their values.

Nothing is counted per token: gauges and counters are the engine's last report, read at a scrape,
and the engine counts its steps itself. Metrics observed here come once for a job or an append.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.keys import NUM_LANES
from shared.messages import FinishReason
from shared.metrics import CONTENT_TYPE, Exposition, MetricRow, MetricsNames, MetricTable
from shared.settings import SettingsError
from worker.engine.measures import SIZES, STEP_SECONDS
from worker.engine.request import RequestTimes
from worker.heartbeat import Heartbeat, LoadReport, SwapCounts
from worker.publisher import Output
from worker.running_jobs import RunningJob
from worker.runtime.supervisor import EngineSupervisor

METRICS = MetricTable(
    (
        MetricRow(
            "penstock:num_requests_running",
            "gauge",
            (),
            "Sequences in the engine's batch, in prefill or decoding.",
            True,
        ),
        MetricRow(
            "penstock:num_requests_waiting",
            "gauge",
            (),
            "Sequences that this worker has taken and that wait for a place in the batch.",
            True,
        ),
        MetricRow(
            "penstock:kv_cache_usage_perc",
            "gauge",
            (),
            "Part of the KV blocks that sequences hold, 0 to 1.",
            True,
        ),
        MetricRow(
            "penstock:kv_cache_capacity_tokens",
            "gauge",
            (),
            "Tokens that the blocks hold, if no window has left any.",
        ),
        MetricRow(
            "penstock:num_preemptions_total",
            "counter",
            (),
            "Sequences that gave up their blocks for others and are computed again.",
            True,
        ),
        MetricRow(
            "penstock:lane_preemptions_total",
            "counter",
            ("lane",),
            "Sequences of this lane that gave slot or blocks to jobs of higher lanes, and wait.",
        ),
        MetricRow(
            "penstock:prompt_tokens_total",
            "counter",
            (),
            "Prompt tokens computed or found in the prefix cache.",
            True,
        ),
        MetricRow("penstock:generation_tokens_total", "counter", (), "Tokens generated.", True),
        MetricRow(
            "penstock:prefix_cache_queries_total",
            "counter",
            (),
            "Tokens looked up in the prefix cache.",
            True,
        ),
        MetricRow(
            "penstock:prefix_cache_hits_total",
            "counter",
            (),
            "Tokens found in the prefix cache.",
            True,
        ),
        MetricRow(
            "penstock:kv_offload_blocks",
            "gauge",
            (),
            "Evicted KV blocks in host memory (PENSTOCK_KV_OFFLOADING_GB).",
        ),
        MetricRow(
            "penstock:kv_offload_disk_blocks",
            "gauge",
            (),
            "Evicted KV blocks in PENSTOCK_KV_OFFLOADING_DIR.",
        ),
        MetricRow(
            "penstock:kv_offload_stored_blocks_total",
            "counter",
            (),
            "KV blocks copied to host memory when they were evicted.",
        ),
        MetricRow(
            "penstock:kv_offload_loaded_blocks_total",
            "counter",
            (),
            "KV blocks copied back instead of being computed again; their tokens are among "
            "penstock:prefix_cache_hits_total.",
        ),
        MetricRow(
            "penstock:kv_offload_unwritten_blocks_total",
            "counter",
            (),
            "KV blocks that left host memory and were not on the disk: it is too slow or small, "
            "its writes fail, or a step evicted more than it may copy.",
        ),
        MetricRow(
            "penstock:step_seconds", "histogram", (), "Time from one engine step to the next."
        ),
        MetricRow("penstock:step_sequences", "histogram", (), "Sequences in the batch of a step."),
        MetricRow(
            "penstock:iteration_tokens_total",
            "histogram",
            (),
            "Tokens in the batch of a step, of prompts and generated ones.",
            True,
        ),
        MetricRow(
            "penstock:failed_steps_total",
            "counter",
            (),
            "Steps that raised and were computed again.",
        ),
        MetricRow(
            "penstock:request_queue_time_seconds",
            "histogram",
            (),
            "From the submit of a job to its first engine step: in Redis, then in the engine. For "
            "a resumed job, only in the engine.",
            True,
        ),
        MetricRow(
            "penstock:request_prefill_time_seconds",
            "histogram",
            (),
            "From the first engine step of a sequence to its first token.",
            True,
        ),
        MetricRow(
            "penstock:request_decode_time_seconds",
            "histogram",
            (),
            "From the first token of a sequence to its last.",
            True,
        ),
        MetricRow(
            "penstock:request_prompt_tokens", "histogram", (), "Prompt tokens of a job.", True
        ),
        MetricRow(
            "penstock:request_generation_tokens",
            "histogram",
            (),
            "Generated tokens of a job, of all its choices and attempts.",
            True,
        ),
        MetricRow(
            "penstock:request_max_num_generation_tokens",
            "histogram",
            (),
            "Generated tokens of a job's longest choice.",
            True,
        ),
        MetricRow("penstock:request_params_max_tokens", "histogram", (), "max_tokens.", True),
        MetricRow(
            "penstock:request_success_total",
            "counter",
            ("finished_reason",),
            "Jobs whose end this worker wrote into their logs: stop, length or error.",
            True,
        ),
        MetricRow(
            "penstock:migrations_total",
            "counter",
            (),
            "Jobs resumed from another attempt: after a crash, a drain or a lost lease.",
        ),
        MetricRow(
            "penstock:jobs_by_prefix_total",
            "counter",
            (),
            "Jobs that it got because its prefix cache held the longest part of their prompts.",
        ),
        MetricRow(
            "penstock:publish_lag_seconds",
            "histogram",
            (),
            "From the oldest token of an append to its confirmation by Redis.",
        ),
        MetricRow(
            "penstock:publish_backlog_seconds",
            "gauge",
            (),
            "Age of the oldest token that Redis has not confirmed; 0: none waits.",
        ),
        MetricRow(
            "penstock:publish_backlog_tokens", "gauge", (), "Tokens that Redis has not confirmed."
        ),
        MetricRow(
            "penstock:heartbeat_age_seconds",
            "gauge",
            (),
            "Since the last heartbeat that Redis confirmed; beyond PENSTOCK_LEASE_MS others take "
            "the jobs.",
        ),
        MetricRow(
            "penstock:worker_draining",
            "gauge",
            (),
            "1 while this worker takes no new jobs: it stops, or an operator ordered it.",
        ),
        MetricRow("penstock:engine_up", "gauge", (), "1 while the engine takes jobs."),
        MetricRow("penstock:engine_restarts_total", "counter", (), "Engines that were replaced."),
        MetricRow("penstock:device_failures_total", "counter", (), "Failures of the device."),
        MetricRow(
            "penstock:model_swaps_total",
            "counter",
            (),
            "Models of PENSTOCK_MODELS that this worker has loaded instead of another.",
        ),
        MetricRow(
            "penstock:model_swap_seconds_total",
            "counter",
            (),
            "Time of these swaps, from the last job of a model until the next one was served.",
        ),
        MetricRow(
            "penstock:model_load_failures_total",
            "counter",
            (),
            "Loads of models of PENSTOCK_MODELS that failed.",
        ),
        MetricRow(
            "penstock:worker_info",
            "gauge",
            ("version", "engine", "engine_version", "dtype"),
            "Always 1; the labels name this worker's versions.",
        ),
    ),
    labels=("model_name", "worker"),
)
_VERSION = version("penstock")  # read from a file
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class WorkerMetrics:
    """What one worker has observed, and its exposition."""

    def __init__(self, model_name: str, worker_id: str, names: MetricsNames) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "worker": worker_id}
        self._names = names

        histogram, registry = METRICS.histogram, self._registry
        self._queue_s = histogram("penstock:request_queue_time_seconds", registry, _SECONDS)
        self._prefill_s = histogram("penstock:request_prefill_time_seconds", registry, _SECONDS)
        self._decode_s = histogram("penstock:request_decode_time_seconds", registry, _SECONDS)
        self._prompt = histogram("penstock:request_prompt_tokens", registry, SIZES)
        self._generated = histogram("penstock:request_generation_tokens", registry, SIZES)
        self._longest = histogram("penstock:request_max_num_generation_tokens", registry, SIZES)
        self._max_tokens = histogram("penstock:request_params_max_tokens", registry, SIZES)
        self._ended = METRICS.counter("penstock:request_success_total", registry)
        self._gave_way = METRICS.counter("penstock:lane_preemptions_total", registry)
        self._migrations = METRICS.counter("penstock:migrations_total", registry)
        self._by_prefix = METRICS.counter("penstock:jobs_by_prefix_total", registry)
        self._publish_lag_s = histogram("penstock:publish_lag_seconds", registry, _SECONDS)
        for reason in ("stop", "length", "error"):
            self._ended.labels(reason)  # a series that starts at 0 shows its first increase
        for lane in range(1, NUM_LANES):  # nothing is above lane 0
            self._gave_way.labels(str(lane))

    def job_taken(self, attempt: int, *, is_by_prefix: bool) -> None:
        """Counts a delivery."""
        if attempt > 1:
            self._migrations.inc()
        if is_by_prefix:
            self._by_prefix.inc()

    def gave_way(self, lane: int) -> None:
        """Counts a sequence that was preempted for a job of a higher lane."""
        self._gave_way.labels(str(lane)).inc()

    def sequence_ended(self, waited_s: float, times: RequestTimes) -> None:
        """Counts the times of one sequence, which had waited in the queue before."""
        self._queue_s.observe(waited_s + times.queued_s)
        self._prefill_s.observe(times.prefill_s)
        self._decode_s.observe(times.decode_s)

    def job_ended(self, running: RunningJob) -> None:
        """Counts a job whose end is durable."""
        natural = running.end_reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._ended.labels(running.end_reason if natural else "error").inc()
        self._prompt.observe(len(running.job.prompt_token_ids))
        self._generated.observe(running.num_tokens)
        self._longest.observe(max(choice.num_tokens for choice in running.choices))
        self._max_tokens.observe(running.job.sampling.max_tokens)

    def published(self, lag_s: float) -> None:
        """Counts an append that Redis has confirmed."""
        self._publish_lag_s.observe(lag_s)

    def read_from(self, collector: Collector) -> None:
        """Adds metrics that are read from state at each scrape."""
        self._registry.register(collector)

    @property
    def exposition(self) -> Exposition:
        return Exposition(METRICS, self._registry, self._names, self._labels)


class WorkerStateCollector(Collector):
    """Reads gauges and the engine's counters at each scrape. It runs in the listener's thread, so
    it must iterate over copies."""

    def __init__(
        self,
        load: LoadReport,
        supervisor: EngineSupervisor,
        publisher: Output,
        heartbeat: Heartbeat,
        swaps: SwapCounts,
    ) -> None:
        self._load = load
        self._supervisor = supervisor
        self._publisher = publisher
        self._heartbeat = heartbeat
        self._swaps = swaps

    def collect(self) -> Iterable[Metric]:
        value, supervisor, publisher = METRICS.value, self._supervisor, self._publisher
        stats, ready = supervisor.stats, supervisor.ready
        waiting = stats.get("waiting", 0) + self._load.num_pending
        total, free = stats.get("total_blocks", 0), stats.get("free_blocks", 0)
        yield value("penstock:num_requests_running", stats.get("running", 0))
        yield value("penstock:num_requests_waiting", waiting)
        yield value("penstock:kv_cache_usage_perc", 1 - free / total if total else 0.0)
        yield value(
            "penstock:kv_cache_capacity_tokens", ready.config.capacity_tokens if ready else 0
        )
        yield value("penstock:kv_offload_blocks", stats.get("offload_blocks", 0))
        yield value("penstock:kv_offload_disk_blocks", stats.get("offload_disk_blocks", 0))
        for name, stat in _COUNTERS.items():
            yield value(name, stats.get(stat, 0))
        for name, (bounds, measure) in _STEPS.items():
            yield METRICS.counted(name, bounds, *supervisor.measures[measure])
        yield value("penstock:publish_backlog_seconds", publisher.backlog_s)
        yield value("penstock:publish_backlog_tokens", publisher.num_unsent_total)
        yield value("penstock:heartbeat_age_seconds", self._heartbeat.age_s)
        yield value("penstock:worker_draining", int(self._heartbeat.draining))
        yield value("penstock:engine_up", int(supervisor.up.is_set()))
        yield value("penstock:engine_restarts_total", supervisor.num_restarts)
        yield value("penstock:device_failures_total", supervisor.num_device_failures)
        yield value("penstock:model_swaps_total", self._swaps.num_swaps)
        yield value("penstock:model_swap_seconds_total", self._swaps.seconds)
        yield value("penstock:model_load_failures_total", self._swaps.num_failures)
        engine = (ready.engine_name, ready.engine_version, ready.dtype) if ready else ("", "", "")
        yield value("penstock:worker_info", 1, (_VERSION, *engine))


# Since the engine's start: a new engine counts from 0, as a new process would.
_COUNTERS = {
    "penstock:num_preemptions_total": "preemptions",
    "penstock:prompt_tokens_total": "prompt_tokens",
    "penstock:generation_tokens_total": "generated_tokens",
    "penstock:prefix_cache_queries_total": "prefix_query_tokens",
    "penstock:prefix_cache_hits_total": "prefix_hit_tokens",
    "penstock:kv_offload_stored_blocks_total": "offload_stored_blocks",
    "penstock:kv_offload_loaded_blocks_total": "offload_loaded_blocks",
    "penstock:kv_offload_unwritten_blocks_total": "offload_unwritten_blocks",
    "penstock:failed_steps_total": "failed_steps",
}
_STEPS = {
    "penstock:step_seconds": (STEP_SECONDS, "seconds"),
    "penstock:step_sequences": (SIZES, "sequences"),
    "penstock:iteration_tokens_total": (SIZES, "tokens"),
}


# Takes a path. Returns why its probe fails, '' if it succeeds, None if the path is no probe's.
Probe = Callable[[str], str | None]
Read = Callable[[], bytes]  # the exposition, in the text format


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, read: Read, probe: Probe) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.read = read
        self.probe = probe
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers every path except probes in the text format: the client library's own listener
    also speaks OpenMetrics, in which it writes `penstock_` for `penstock:`."""

    server: _Server

    def do_GET(self) -> None:
        failure = self.server.probe(self.path.partition("?")[0])
        if failure is None:
            self._answer(200, self.server.read(), CONTENT_TYPE)
        else:
            text = f"{failure or 'ok'}\n".encode()
            self._answer(503 if failure else 200, text, "text/plain; charset=utf-8")

    def _answer(self, status: int, text: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing: a line of each scrape would bury all others."""


@contextmanager
def metrics_listener(read: Read, probe: Probe, host: str, port: int | None) -> Iterator[None]:
    """Serves the exposition that `read` returns over HTTP, in a thread, at every path that is no
    probe's; nothing where `port` is None.

    Raises SettingsError if the port cannot be listened on.
    """
    if port is None:
        yield
        return
    try:
        server = _Server(host, port, read, probe)
    except OSError as error:
        raise SettingsError(
            f"The metrics cannot listen on {host} port {port}: {error.strerror or error}. Set "
            "PENSTOCK_METRICS_HOST or PENSTOCK_METRICS_PORT."
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
