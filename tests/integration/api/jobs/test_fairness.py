"""One tenant, or two, flood the queue at default limits: the others are accepted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.keys import Keys
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service

KEYS = Keys(acme="", bolt="", dune="")
BODY = {"model": MODEL, "input": "a gate", "background": True, "max_output_tokens": 4}


@pytest.fixture
def keyed(redis_url: str, checkpoint: Path) -> Iterator[RunningService]:
    """All limits are the defaults."""
    with running_service(redis_url, new_namespace(), checkpoint, api_keys=KEYS.lines) as service:
        service.park()
        yield service


@pytest.mark.promise(
    "Access: a flood delays only its own tenant, and no job starves (with the default limits; "
    "about 20 tenants can flood the queue at once before one without queued jobs is refused)"
)
def test_one_tenant_or_two_that_flood_the_queue_do_not_lock_out_another(
    keyed: RunningService,
) -> None:
    asyncio.run_coroutine_threadsafe(flood_in_turn(keyed), keyed.loop).result(120)


async def flood_in_turn(keyed: RunningService) -> None:
    """On the service's loop, without sockets: a thousand requests are a matter of admission."""
    gate = asyncio.Semaphore(32)

    async def send(client: httpx.AsyncClient, tenant: str) -> httpx.Response:
        async with gate:
            return await client.post(
                "/v1/responses", json=BODY, headers={"authorization": f"Bearer {KEYS[tenant]}"}
            )

    async def flood(client: httpx.AsyncClient, tenant: str, count: int) -> list[httpx.Response]:
        return await asyncio.gather(*(send(client, tenant) for _ in range(count)))

    transport = httpx.ASGITransport(keyed.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        acme = await flood(client, "acme", 1100)
        assert Counter(answer.status_code for answer in acme) == {200: 750, 429: 350}
        refused = next(answer for answer in acme if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "tenant_queue_full"
        assert "Your share" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 72
        bolt = await flood(client, "bolt", 8)
        assert [answer.status_code for answer in bolt] == [200] * 8
        bolt = await flood(client, "bolt", 300)
        assert Counter(answer.status_code for answer in bolt) == {200: 142, 429: 158}
        dune = await flood(client, "dune", 5)
        assert [answer.status_code for answer in dune] == [200] * 5
