"""What a deployment of real processes exposes: all that the tables say, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from api.metrics import DEPLOYMENT_METRICS
from api.metrics import METRICS as FRONTEND_METRICS
from shared.keys import NUM_LANES
from tests.support.launched import free_port
from tests.support.metrics import Scrape, names_of
from tests.support.redis_server import new_namespace
from tests.support.running_service import wait_until
from tests.support.service_processes import (
    MODEL,
    REPOSITORY,
    FrontendProcess,
    WorkerProcess,
    process,
    worker_process,
)
from tests.support.variables import with_prefix
from worker.metrics import METRICS as WORKER_METRICS

NUM_TOKENS = 12
# Of the board in vLLM's repository, those that its releases still have.
VLLMS_BOARD = {
    "vllm:e2e_request_latency_seconds",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_max_num_generation_tokens",
}


@dataclass
class Deployment:
    """Two frontends and the workers that listen on `ports`."""

    frontends: list[FrontendProcess]
    workers: dict[int, WorkerProcess]

    def generate(self, frontend: int, prompt: str, **further: object) -> httpx.Response:
        url = f"{self.frontends[frontend].base_url}/generate"
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": False, **further}
        return httpx.post(url, json=body, timeout=60)

    def of_frontend(self, index: int) -> Scrape:
        return Scrape.of(f"{self.frontends[index].base_url}/metrics")

    def of_deployment(self, index: int) -> Scrape:
        return Scrape.of(f"{self.frontends[index].base_url}/metrics/deployment")

    def of_worker(self, port: int) -> Scrape:
        return Scrape.of(f"http://127.0.0.1:{port}/metrics")


@pytest.fixture
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def deployment(
    redis_url: str, checkpoint: Path, tmp_path: Path, settings: dict[str, str]
) -> Iterator[Deployment]:
    first, namespace = free_port(2), new_namespace()
    with ExitStack() as stack:
        workers = {
            port: stack.enter_context(
                worker_process(
                    redis_url,
                    namespace,
                    checkpoint,
                    tmp_path / f"{port}.log",
                    METRICS_PORT=str(port),
                    ECHO_STEP_MS="20",
                    LEASE_MS="1500",
                    **settings,
                )
            )
            for port in (first, first + 1)
        }
        frontends = [
            stack.enter_context(process(redis_url, namespace, **settings)) for _ in range(2)
        ]
        deployment = Deployment(frontends, workers)

        def all_ready() -> bool:
            counts = [deployment.of_deployment(i) for i in range(2)]
            return all(s.total("penstock:model_workers") == 2 for s in counts)

        wait_until(all_ready, "two workers", 60)
        yield deployment


def test_every_metric_of_the_tables_is_exposed_and_no_other(deployment: Deployment) -> None:
    for frontend in (0, 1):
        assert deployment.generate(frontend, "a turbine and a gate").status_code == 200
        assert deployment.of_frontend(frontend).names == names_of(FRONTEND_METRICS)
        assert deployment.of_deployment(frontend).names == names_of(DEPLOYMENT_METRICS)
    for port in deployment.workers:
        assert deployment.of_worker(port).names == names_of(WORKER_METRICS)


def test_sums_over_processes_are_what_happened(deployment: Deployment) -> None:
    """Frontends and workers add up; what is known of all is the same at every frontend."""
    prompt = "the keeper of the weir writes the level of the water into a book " * 2
    for number in range(6):
        assert deployment.generate(number % 2, prompt).status_code == 200
    refused = deployment.generate(0, prompt, max_tokens=0)
    assert refused.status_code == 400

    def ended(index: int) -> float:
        counts = deployment.of_deployment(index)
        return counts.total("penstock:jobs_ended_total", state="finished")

    wait_until(lambda: [ended(0), ended(1)] == [6, 6], "each frontend to say the same")
    frontends = [deployment.of_frontend(index) for index in (0, 1)]
    ends = "penstock:e2e_request_latency_seconds_count"
    assert [scrape.total(ends, model_name=MODEL) for scrape in frontends] == [3, 3]
    tokens = "penstock:response_generation_tokens_total"
    assert sum(scrape.total(tokens) for scrape in frontends) == 6 * NUM_TOKENS

    def of_workers(name: str, **labels: str) -> float:
        return sum(deployment.of_worker(p).total(name, **labels) for p in deployment.workers)

    wait_until(lambda: of_workers("penstock:step_seconds_count") >= NUM_TOKENS, "the last report")
    for name in ("queue_time", "prefill_time", "decode_time"):
        assert of_workers(f"penstock:request_{name}_seconds_count", model_name=MODEL) == 6, name
    # A step of the echo engine takes 20 ms: one to the first token, eleven more to the last.
    assert of_workers("penstock:request_prefill_time_seconds_sum") >= 6 * 0.02
    assert of_workers("penstock:request_decode_time_seconds_sum") >= 6 * 11 * 0.02
    assert of_workers("penstock:request_success_total", finished_reason="length") == 6
    assert of_workers("penstock:request_generation_tokens_sum") == 6 * NUM_TOKENS
    wait_until(
        lambda: of_workers("penstock:generation_tokens_total") >= 6 * NUM_TOKENS, "all tokens"
    )
    assert of_workers("penstock:prefix_cache_queries_total") > 0
    hits = of_workers("penstock:prefix_cache_hits_total")
    assert 0 < hits < of_workers("penstock:prefix_cache_queries_total")
    assert of_workers("penstock:publish_lag_seconds_count") >= 6
    assert of_workers("penstock:iteration_tokens_total_sum") >= 6 * NUM_TOKENS
    assert of_workers("penstock:migrations_total") == 0
    workers = set.union(
        *(deployment.of_worker(p).label_values("worker") for p in deployment.workers)
    )
    assert len(workers) == 2


@pytest.mark.parametrize("settings", [{"MAX_NUM_SEQS": "1"}])
def test_preemptions_show_by_lane_and_prefix_hits_by_worker(
    deployment: Deployment, settings: dict[str, str]
) -> None:
    preempted, hits = "penstock:lane_preemptions_total", "penstock:prefix_cache_hits_total"
    for port in deployment.workers:
        scrape = deployment.of_worker(port)
        lanes = {labels["lane"]: n for name, labels, n in scrape.samples if name == preempted}
        assert lanes == {str(lane): 0.0 for lane in range(1, NUM_LANES)}, "from the start"
    prompt = "the keeper of the weir writes the level of the water into a book " * 2
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
    url = f"{deployment.frontends[0].base_url}/v1/completions"
    with ThreadPoolExecutor(8) as pool:
        low = body | {"priority": 5}
        waiting = [pool.submit(httpx.post, url, json=low, timeout=60) for _ in range(8)]
        wait_until(
            lambda: deployment.of_deployment(0).total("penstock:jobs_running") == 2,
            "both slots to be taken",
        )
        assert deployment.generate(1, prompt).status_code == 200
        assert [job.result().status_code for job in waiting] == [200] * 8
    scrapes = {port: deployment.of_worker(port) for port in deployment.workers}
    by_lane = {
        lane: sum(scrape.total(preempted, lane=lane) for scrape in scrapes.values())
        for lane in map(str, range(1, NUM_LANES))
    }
    assert by_lane.pop("5") > 0
    assert not any(by_lane.values())
    workers = {next(iter(scrape.label_values("worker"))) for scrape in scrapes.values()}
    by_worker = {w: sum(s.total(hits, worker=w) for s in scrapes.values()) for w in workers}
    assert len(by_worker) == 2
    assert any(by_worker.values())

    def shown() -> bool:
        health = httpx.get(f"{deployment.frontends[0].base_url}/health", timeout=10).json()
        texts = [worker["lane_preemptions"] for worker in health["workers"]]
        return any(text.startswith("5:") for text in texts)

    wait_until(shown, "the workers' heartbeats")


def test_a_killed_workers_job_is_counted_as_a_migration(deployment: Deployment) -> None:
    url = f"{deployment.frontends[0].base_url}/generate"
    body = {"prompt": "a long answer", "max_tokens": 200, "stream": True, "ignore_eos": True}

    def running(port: int) -> float:
        return deployment.of_worker(port).total("penstock:num_requests_running")

    with httpx.stream("POST", url, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        wait_until(lambda: any(running(port) for port in deployment.workers), "its worker")
        (port,) = (port for port in deployment.workers if running(port))
        deployment.workers[port].signal(signal.SIGKILL)
        assert any('"length"' in line for line in lines), "the stream goes on to its end"
    (other,) = deployment.workers.keys() - {port}
    assert deployment.of_worker(other).total("penstock:migrations_total") == 1
    counted = deployment.of_worker(other).total("penstock:request_queue_time_seconds_sum")
    assert counted < 1.0, "the wait for the other worker is no wait in the queue"


@pytest.mark.parametrize("settings", [{"METRICS_NAMES": "vllm"}, {"METRICS_NAMES": "both"}])
def test_vllms_names_are_there_by_a_setting(
    deployment: Deployment, settings: dict[str, str]
) -> None:
    """Those that vLLM's own board asks for, each with the label by which it chooses a model."""
    assert deployment.generate(0, "a gate").status_code == 200
    scrapes = [deployment.of_frontend(0), *map(deployment.of_worker, deployment.workers)]
    names = frozenset[str]().union(*(scrape.names for scrape in scrapes))
    assert names >= VLLMS_BOARD
    rows = [*FRONTEND_METRICS.rows, *WORKER_METRICS.rows]
    for row in rows:
        assert (row.name in names) is (not row.is_vllms or settings["METRICS_NAMES"] == "both")
        vllms = "vllm:" + row.name.removeprefix("penstock:")
        assert (vllms in names) is row.is_vllms
    for scrape in scrapes:
        for name, labels, _ in scrape.samples:
            assert not name.startswith("vllm:") or labels["model_name"] == MODEL, name


def test_a_port_that_is_taken_ends_the_worker_with_one_sentence(
    deployment: Deployment, redis_url: str, checkpoint: Path
) -> None:
    port = next(iter(deployment.workers))
    ended = subprocess.run(
        [sys.executable, "-m", "worker"],
        cwd=REPOSITORY,
        env=with_prefix({"REDIS_URL": redis_url, "MODEL": checkpoint, "METRICS_PORT": port}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert f"port {port}" in ended.stderr.splitlines()[-1]
