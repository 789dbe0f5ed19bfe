"""The least that a relay can be: one Redis channel to one SSE response; for bench.relay.

No log, no order, no recovery: what is published while nobody listens is gone.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import redis.asyncio as redis
from fastapi import FastAPI
from fastapi.responses import StreamingResponse


def app() -> FastAPI:
    """GET /relay/{n}?channel=...: the channel's next n messages."""
    served = FastAPI()
    pool = redis.Redis.from_url(os.environ["RELAY_REDIS_URL"], max_connections=1000)

    @served.get("/relay/{n}")
    async def relay(n: int, channel: str) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            async with pool.pubsub() as subscription:
                await subscription.subscribe(channel)
                seen = 0
                async for message in subscription.listen():
                    if message["type"] == "message":
                        yield b"data: " + message["data"] + b"\n\n"
                        seen += 1
                        if seen == n:
                            return

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return served
