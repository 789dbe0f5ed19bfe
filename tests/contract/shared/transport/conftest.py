"""One transport per test: over a real server and over the in-process stand-in."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from shared.redis.connections import forget_fake_server
from shared.transport.connect import RedisTransport, open_transport
from tests.support.redis_server import namespace, redis_url  # noqa: F401


@pytest.fixture(params=["real", "fake"])
async def transport(
    request: pytest.FixtureRequest,
) -> AsyncIterator[RedisTransport]:
    if request.param == "real":
        url = request.getfixturevalue("redis_url")
        name = f"test-{uuid.uuid4().hex[:12]}"
    else:
        url, name = f"fake://{uuid.uuid4().hex}", "test"
    opened = await open_transport(url, namespace=name)
    yield opened
    redis = opened.connections.cmd
    keys = [key async for key in redis.scan_iter(match=f"{name}:*", count=1000)]
    if keys:
        await redis.delete(*keys)
    await opened.aclose()
    if request.param == "fake":
        forget_fake_server(url)


@pytest.fixture
async def real(redis_url: str, namespace: str) -> AsyncIterator[RedisTransport]:  # noqa: F811
    opened = await open_transport(redis_url, namespace=namespace)
    yield opened
    await opened.aclose()
