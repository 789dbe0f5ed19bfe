"""A worker that loads its model says how far it is."""

from __future__ import annotations

from pathlib import Path

from shared.transport.connect import open_transport
from shared.transport.ports.deployment import Deployment, ProcessKind, ProcessReport
from tests.support.checkpoints import make_checkpoint
from tests.support.polling import until
from tests.support.redis_server import namespace, redis_url  # noqa: F401
from tests.support.service_processes import MODEL, worker_process
from tests.support.tiny_hub import MODEL as TINY
from tests.support.tiny_hub import tiny_hub


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


async def test_a_worker_reports_its_download_under_the_id_that_it_serves_with(
    redis_url: str,  # noqa: F811
    namespace: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    transport = await open_transport(redis_url, namespace=namespace)
    checkpoint = make_checkpoint(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with tiny_hub(files, held=frozenset({"model.safetensors"})) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "MODEL": TINY}
        log = tmp_path / "log"
        with worker_process(redis_url, namespace, checkpoint, log, **settings):
            deployment = transport.deployment
            # Until all files are listed, those that are known may all be there.
            (loading,) = await until(lambda: _with_less_than_all(deployment), timeout_s=60)
            stats = loading.stats
            assert (stats["model"], stats["stage"]) == (MODEL, "downloading"), log.read_text()
            hub.release.set()
            (worker,) = await until(transport.registry.workers, timeout_s=60)
            assert worker.worker_id == loading.process_id
    await transport.aclose()


async def _with_less_than_all(deployment: Deployment) -> list[ProcessReport]:
    reports = await deployment.reports(ProcessKind.LOADING, 10)
    return [report for report in reports if 0 <= int(report.stats["percent"]) < 100]


async def _has_stopped(deployment: Deployment) -> bool:
    """A worker that serves reports no loading: the last report grows old, or has gone."""
    return all(report.age_s > 3 for report in await deployment.reports(ProcessKind.LOADING, 10))
