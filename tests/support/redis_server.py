"""A real server for tests: one private server per test process, one namespace per test.

Import the fixtures where they are needed:

    from tests.support.redis_server import namespace, redis_url  # noqa: F401

There is no skipping: a test that speaks of Redis fails where no server can be found. Nothing here
or in the tests empties a shared server; a test that needs one for itself starts a PrivateServer.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from penstock.launcher.redis_server import PrivateServer
from shared.keys import HOME, MAX_PARTITIONS, Keys

# Keys that live as long as the deployment; each has a bound (docs/WIRE.md).
KEYS_WITHOUT_TTL = frozenset({"stat", "workers"})


@functools.cache
def shared_server(config: pytest.Config) -> PrivateServer:
    """This process's private server, started at the first call, stopped at the session's end.

    Not at the process's: xdist kills a process that does not end in ten seconds, which on a busy
    machine the server's last write to its file may take, and its folder would stay.
    """
    server = PrivateServer()
    server.start()  # raises ServerError, in words, where there is none
    config.pluginmanager.register(_StopsAtTheEnd(server))
    return server


class _StopsAtTheEnd:
    def __init__(self, server: PrivateServer) -> None:
        self._server = server

    def pytest_sessionfinish(self) -> None:
        self._server.stop()


def new_namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> str:
    return shared_server(pytestconfig).url


@pytest.fixture
async def namespace(redis_url: str) -> AsyncIterator[str]:
    """A namespace of the test's own; its keys are removed afterwards."""
    name = new_namespace()
    yield name
    client = redis.asyncio.Redis.from_url(redis_url)
    try:
        await remove_namespace(client, name)
    finally:
        await client.aclose()


async def keys_of(client: redis.asyncio.Redis, namespace: str) -> list[str]:
    pattern = f"{namespace}:*"
    return sorted({key.decode() async for key in client.scan_iter(match=pattern, count=1000)})


async def remove_namespace(client: redis.asyncio.Redis, namespace: str) -> None:
    if keys := await keys_of(client, namespace):
        await client.delete(*keys)


async def assert_every_key_expires(client: redis.asyncio.Redis, namespace: str) -> None:
    """Every key has a TTL, except the documented few that live as long as the deployment."""
    partitions = [Keys(namespace, number) for number in range(MAX_PARTITIONS)]
    allowed = {keys.prefix + name for name in KEYS_WITHOUT_TTL for keys in partitions}
    allowed.add(partitions[HOME].meta)
    immortal = [
        key
        for key in await keys_of(client, namespace)
        if key not in allowed and await client.pttl(key) == -1
    ]
    assert not immortal, f"keys without TTL: {immortal}"
