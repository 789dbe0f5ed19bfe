"""A server that would lose jobs is refused with a sentence; so is a second owner of its data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from penstock.launcher.redis_server import PrivateServer, ServerError
from tests.chaos.harness.deployment import Deployment
from tests.support.polling import until
from tests.support.service_processes import FrontendProcess, WorkerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path / "data") as started:
        yield started


def _evicting(client: redis.Redis) -> str:
    client.config_set("maxmemory-policy", "allkeys-lru")
    return "maxmemory-policy is allkeys-lru"


def _replica(client: redis.Redis) -> str:
    client.replicaof("127.0.0.1", "1")
    return "replica"


@pytest.mark.parametrize("spoil", [_evicting, _replica])
async def test_a_server_that_would_lose_jobs_is_refused_by_both_sides(
    deployment: Deployment, server: PrivateServer, tmp_path: Path, spoil: object
) -> None:
    with redis.Redis.from_url(server.url) as client:
        sentence = spoil(client)  # type: ignore[operator]
    where = {"REDIS_URL": server.url}
    worker = WorkerProcess(deployment.worker_settings() | where, tmp_path / "worker.log")
    frontend = FrontendProcess(deployment.frontend_settings() | where, tmp_path / "frontend.log")
    try:
        assert await worker.ended() == 2
        assert sentence in worker.log
        await until(frontend.started, "the frontend's port")
        await until(lambda: sentence in frontend.log, "the frontend's sentence")
        assert await frontend.status("/ready") == 503
        async with httpx.AsyncClient() as http:
            refused = await http.post(frontend.base_url + "/generate", json={"prompt": "a"})
        assert refused.status_code in (404, 503)
    finally:
        worker.close()
        frontend.close()


async def test_a_second_owner_of_a_data_directory_is_refused(
    server: PrivateServer, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match="in use by another"):
        PrivateServer(tmp_path / "data").start()
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
