"""TENSOR_PARALLEL_SIZE=2 through the front door: streams outlive a rank, no process outlives it."""

from __future__ import annotations

import os
import signal
import time

from tests.support.launched import is_alive
from tests.support.service_client import ServiceClient, launched_service, token_ids_of

STALL_LIMIT_S = 2
BODY = {
    "prompt": "Once upon a time",
    "max_tokens": 300,
    "temperature": 0.8,
    # With 11 the 134th draw falls between two tokens within 1e-6: sums of float32 differ that much.
    "seed": 12,
    "ignore_eos": True,
}


service = launched_service(
    {
        "TENSOR_PARALLEL_SIZE": "2",
        "DTYPE": "float32",
        "DEVICE": "cpu",
        "NUM_KV_BLOCKS": "256",
        "STALL_LIMIT_S": str(STALL_LIMIT_S),
        "BEAT_INTERVAL_MS": "100",
        "HEALTH_INTERVAL_S": "0.05",
    }
)
RANK_0, RANK_1 = "worker.runtime", "worker.model.rank"


def test_a_stream_goes_on_when_a_rank_dies_or_stands_still(service: ServiceClient) -> None:
    with service.stream("/generate", BODY) as events:
        expected = token_ids_of(list(events))
    assert len(expected) == 300
    ends = ((RANK_1, signal.SIGKILL), (RANK_0, signal.SIGKILL), (RANK_1, signal.SIGSTOP))
    for module, number in ends:
        pids = [service.pid_of(RANK_0), service.pid_of(RANK_1)]
        with service.stream("/generate", BODY) as events:
            seen = [next(events) for _ in range(20)]
            os.kill(service.pid_of(module), number)
            if number == signal.SIGKILL:
                begin_s = time.monotonic()
                service.until(lambda pids=pids: not any(map(is_alive, pids)), "both ends", 5)
                assert time.monotonic() - begin_s < 5
            seen += events
        assert token_ids_of(seen) == expected
        assert not any(map(is_alive, pids))
    assert service.worker()["engine_restarts"] == len(ends)


def test_health_shows_the_size_and_the_whole_models_figures(service: ServiceClient) -> None:
    worker = service.worker()
    assert worker["tensor_parallel_size"] == 2
    assert worker["kv_capacity_tokens"] == 256 * worker["block_size"]
    (model,) = service.http.get("/v1/models").json()["data"]
    assert model["num_parameters"] == 2_459_584


def test_no_process_is_left_when_the_worker_is_killed(service: ServiceClient) -> None:
    """The last one here: the launcher starts the worker again or ends."""
    worker = service.pid_of("worker")
    pids = [worker, service.pid_of(RANK_0), service.pid_of(RANK_1)]
    begin_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    service.until(lambda: not any(map(is_alive, pids)), "the end of all", 5)
    assert time.monotonic() - begin_s < 5
