"""What a worker answers to an orchestrator, and that its listener says it as a status."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.metrics import MetricsNames
from shared.transport.ports.jobs import TransportError
from tests.support.launched import free_port
from tests.unit.worker.test_heartbeat import Bench
from worker.heartbeat import STANDSTILL_S, WorkerProbes
from worker.metrics import WorkerMetrics, metrics_listener


class Worker(Bench):
    """A heartbeat and an engine's mark that it is up."""

    def __init__(self, lease_ms: int = 5000) -> None:
        super().__init__(lease_ms)
        self.up = asyncio.Event()
        supervisor: Any = SimpleNamespace(up=self.up)
        self.probes = WorkerProbes(supervisor, self.heartbeat)


async def test_a_worker_is_ready_when_its_engine_is_up_and_the_store_knows_that_it_lives() -> None:
    worker = Worker(lease_ms=50)
    assert worker.probes.not_ready() == "The engine is not up."
    worker.up.set()
    # A lease has not passed since the start, and yet nobody knows of it.
    assert worker.probes.not_ready() == "No heartbeat was confirmed within the lease."
    await worker.heartbeat.send()
    assert worker.probes.not_ready() == ""
    await asyncio.sleep(0.06)
    assert worker.probes.not_ready() == "No heartbeat was confirmed within the lease."
    await worker.heartbeat.send()
    worker.heartbeat.is_stopping = True
    assert worker.probes.not_ready() == "The worker drains."


async def test_a_worker_lives_while_its_loop_turns_though_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    assert worker.probes.not_live() == "", "a model may load for long"

    async def refuse(*_: object) -> None:
        raise TransportError("away")

    monkeypatch.setattr(worker.queue, "heartbeat", refuse)
    now_s = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("worker.heartbeat.time", clock)
    beating = asyncio.create_task(worker.heartbeat.run())
    await asyncio.sleep(0.05)
    now_s += 2 * STANDSTILL_S
    await asyncio.sleep(0.05)
    assert worker.num_troubles > 0
    assert worker.probes.not_live() == "", "it has come round since"
    beating.cancel()
    now_s += STANDSTILL_S + 2
    reason = f"The event loop has been blocked for {STANDSTILL_S + 2:.0f} s."
    assert worker.probes.not_live() == reason


async def test_the_listener_answers_probes_beside_the_metrics() -> None:
    worker, port = Worker(), free_port()
    metrics = WorkerMetrics("m", "w1", MetricsNames.PENSTOCK)
    with metrics_listener(metrics.exposition.text, worker.probes.by_path, "127.0.0.1", port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answered = await client.get("/ready")
            assert (answered.status_code, answered.text) == (503, "The engine is not up.\n")
            worker.up.set()
            await worker.heartbeat.send()
            answered = await client.get("/ready?verbose")
            assert (answered.status_code, answered.text) == (200, "ok\n")
            assert (await client.get("/live")).status_code == 200
            scraped = await client.get("/metrics")
    assert "penstock:migrations_total" in scraped.text
