"""Health is the worst of what the store and the workers report."""

from __future__ import annotations

from typing import Any

import pytest

from api.system.health import MAX_LOADING, MAX_WORD_CHARS, HealthMonitor
from shared.transport.ports.deployment import ProcessReport
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.registry import WorkerStatus
from tests.unit.api.jobs.test_admission import Store


def worker(**more: Any) -> WorkerStatus:
    stats = {"step": 5.0, "waiting": 1.0, "prefilling": 1.0, "active": 2.0, "pending": 1.0}
    members = {"heartbeat_age_s": 0.1, "draining": False, "stalled": False, **more}
    return WorkerStatus("w", ("m",), stats={**stats, "tok_s": 1.5}, **members)  # type: ignore[arg-type]


async def test_health_reports_the_worst_known_state() -> None:
    store = Store()
    health = HealthMonitor(store, store, store)  # type: ignore[arg-type]
    assert health.status == "degraded"
    await health.refresh()
    assert (health.status, health.is_fresh) == ("no_workers", True)
    store.found = [worker(), worker(draining=True)]
    await health.refresh()
    assert (health.status, health.is_fresh) == ("ok", True)
    report = health.report()
    assert (report.running, report.waiting) == (6, 3 + 4)
    assert report.workers is not None
    assert report.workers[0]["tok_s"] == 1.5
    assert [one["status"] for one in report.workers] == ["ok", "draining"]
    store.found = [worker(stalled=True)]
    await health.refresh()
    assert (health.status, health.is_fresh) == ("stalled", True)
    store.failures = 1
    with pytest.raises(TransportError):
        await health.refresh()
    assert (health.status, health.is_fresh) == ("degraded", False)


async def test_workers_that_load_are_told_within_bounds_until_they_serve() -> None:
    store = Store()
    health = HealthMonitor(store, store, store)  # type: ignore[arg-type]
    words = {"model": "m" * 999, "stage": "s" * 999, "percent": "-7 %", "prompt": "secret"}
    store.loading = [
        ProcessReport("w", 0.2, {"model": "m", "stage": "loading weights", "percent": "43"}),
        ProcessReport("x", 0.2, words),
        ProcessReport("y", 0.2, {"percent": "9" * 5000}),
    ]
    await health.refresh()
    assert health.status == "no_workers"
    loading = [worker.model_dump() for worker in health.report().loading or ()]
    assert loading[0] == {
        "id": "w",
        "model": "m",
        "stage": "loading weights",
        "percent": 43,
        "report_age_ms": 200,
    }
    assert (loading[1]["percent"], loading[2]["percent"]) == (0, 100)
    assert {len(loading[1][name]) for name in ("model", "stage")} == {MAX_WORD_CHARS}
    assert "secret" not in str(loading)
    store.found = [worker()]
    await health.refresh()
    assert [worker.id for worker in health.loading] == ["x", "y"]
    store.loading = [ProcessReport(f"w{number}", 0.2, {}) for number in range(500)]
    await health.refresh()
    assert len(health.loading) == MAX_LOADING
