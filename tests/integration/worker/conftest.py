"""One server and checkpoint per test process; workers that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.transport.connect import RedisTransport, open_transport
from tests.integration.worker.job_frontend import Frontend
from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import namespace, redis_url
from tests.support.service_processes import WorkerProcess
from tests.support.throttle import Throttle

__all__ = ["namespace", "redis_url"]

StartWorker = Callable[..., WorkerProcess]
WORKER_SETTINGS: dict[str, Any] = {
    "RUNNER": "echo",
    "LEASE_MS": "2000",
    "BEAT_INTERVAL_MS": "200",
    "DRAIN_TIMEOUT_S": "60",
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def throttle(tmp_path: Path) -> Throttle:
    """Of all workers of the test."""
    return Throttle(tmp_path / "throttle")


@pytest.fixture
def start_worker(
    tmp_path: Path, redis_url: str, namespace: str, checkpoint: Path, throttle: Throttle
) -> Iterator[StartWorker]:
    """`start_worker(MAX_NUM_SEQS=2, ...)`; logs of a failed test are in its tmp_path."""
    workers: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        pass_fds = settings.pop("pass_fds", ())
        given = WORKER_SETTINGS | {
            "REDIS_URL": settings.pop("url", redis_url),
            "NAMESPACE": namespace,
            "MODEL": checkpoint,
            **throttle.env,
            **settings,
        }
        path = tmp_path / f"worker{len(workers)}.log"
        workers.append(WorkerProcess(given, path, pass_fds=pass_fds))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
async def transport(redis_url: str, namespace: str) -> AsyncIterator[RedisTransport]:
    opened = await open_transport(redis_url, namespace=namespace)
    yield opened
    await opened.aclose()


@pytest.fixture
def frontend(transport: RedisTransport, checkpoint: Path) -> Frontend:
    return Frontend(transport.store, checkpoint.name)
