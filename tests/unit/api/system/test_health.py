"""Health is the worst of what the store and the workers report."""

from __future__ import annotations

from typing import Any

import pytest

from api.system.health import HealthMonitor
from shared.transport.ports.jobs import (
    TransportError,
)
from shared.transport.ports.registry import WorkerStatus
from tests.unit.api.jobs.test_admission import Store


def worker(**more: Any) -> WorkerStatus:
    stats = {"step": 5.0, "waiting": 1.0, "prefilling": 1.0, "active": 2.0, "pending": 1.0}
    members = {"heartbeat_age_s": 0.1, "draining": False, "stalled": False, **more}
    return WorkerStatus("w", ("m",), stats={**stats, "tok_s": 1.5}, **members)  # type: ignore[arg-type]


async def test_health_says_the_worst_that_it_knows() -> None:
    store = Store()
    health = HealthMonitor(store, store)  # type: ignore[arg-type]
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
