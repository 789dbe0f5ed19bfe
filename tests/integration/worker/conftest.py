"""One server and checkpoint per test process; workers that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shared.transport.connect import RedisTransport, open_transport
from tests.integration.worker.worker_process import Frontend, WorkerProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import namespace, redis_url
from tests.support.throttle import Throttle

__all__ = ["namespace", "redis_url"]

StartWorker = Callable[..., WorkerProcess]


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

    def start(**settings: object) -> WorkerProcess:
        path = tmp_path / f"worker{len(workers)}.log"
        settings = {"MODEL": checkpoint, **throttle.env} | settings
        workers.append(
            WorkerProcess(path, str(settings.pop("url", redis_url)), namespace, **settings)
        )
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
