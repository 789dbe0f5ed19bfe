"""One transport per test, over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.transport.connect import RedisTransport, open_transport
from tests.support.redis_server import namespace, redis_url  # noqa: F401
from tests.support.transport_steps import Steps


@pytest.fixture
async def transport(redis_url: str, namespace: str) -> AsyncIterator[RedisTransport]:  # noqa: F811
    opened = await open_transport(redis_url, namespace=namespace)
    yield opened
    await opened.aclose()


@pytest.fixture
def steps(transport: RedisTransport) -> Steps:
    return Steps(transport)
