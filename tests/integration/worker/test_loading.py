"""A worker that loads its model says how far it is."""

from __future__ import annotations

from pathlib import Path

from shared.transport.connect import open_transport
from shared.transport.ports.deployment import Deployment, ProcessKind
from tests.contract.shared.transport.steps import until
from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import namespace, redis_url  # noqa: F401
from tests.support.service_processes import MODEL, worker_process


async def test_a_worker_reports_its_loading_until_it_serves(
    redis_url: str,  # noqa: F811
    namespace: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    transport = await open_transport(redis_url, namespace=namespace)
    checkpoint = make_checkpoint(tmp_path / "model")
    with worker_process(redis_url, namespace, checkpoint, tmp_path / "log"):
        (loading,) = await until(
            lambda: transport.deployment.reports(ProcessKind.LOADING, 10), timeout_s=60
        )
        assert loading.stats["model"] == MODEL
        assert loading.stats["stage"]
        assert 0 <= int(loading.stats["percent"]) <= 100
        (worker,) = await until(transport.registry.workers, timeout_s=60)
        assert worker.worker_id == loading.process_id
        await until(lambda: _has_stopped(transport.deployment), timeout_s=60)
    await transport.aclose()


async def _has_stopped(deployment: Deployment) -> bool:
    """A worker that serves reports no loading: the last report grows old, or has gone."""
    return all(report.age_s > 3 for report in await deployment.reports(ProcessKind.LOADING, 10))
