"""Many requests in the same instant are queued, not refused."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from api.services import Services
from tests.support.running_service import MODEL, RunningService

BURST = 300


@pytest.mark.promise("Access: a burst of 300 requests in one instant is queued, not refused")
async def test_a_burst_of_300_requests_in_one_instant_is_queued(service: RunningService) -> None:
    service.script.tokens_per_step = 4
    services: Services = service.app.state.services
    busy = threading.Event()

    async def occupy() -> None:
        """Every text thread is at work on something else while the burst comes."""
        threads = range(services.settings.text_threads)
        await asyncio.gather(*(services.pool.run(busy.wait, 60) for _ in threads))

    occupied = asyncio.run_coroutine_threadsafe(occupy(), service.loop)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "The keeper of the gate writes. " * 20}],
        "max_tokens": 4,
    }
    limits = httpx.Limits(max_connections=BURST)
    async with httpx.AsyncClient(base_url=service.base_url, timeout=120, limits=limits) as client:
        params = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body))
            for _ in range(BURST)
        ]
        with suppress(TimeoutError):  # a refusal answers at once
            async with asyncio.timeout(60):
                while len(services.pool) < BURST and not any(task.done() for task in params):
                    await asyncio.sleep(0.05)
        busy.set()
        answers = Counter([(await task).status_code for task in params])
    assert answers == {200: BURST}
    await asyncio.wrap_future(occupied)
