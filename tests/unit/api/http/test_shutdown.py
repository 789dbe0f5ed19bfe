"""A request that has no response yet when the server's last deadline passes."""

from __future__ import annotations

import asyncio

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from api.http.middleware import ErrorResponsesMiddleware


async def _stuck(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def test_a_request_without_a_response_at_the_deadline_is_told_to_try_another_frontend() -> (
    None
):
    config = uvicorn.Config(
        ErrorResponsesMiddleware(_stuck), port=0, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(timeout=30) as client:
        asking = asyncio.create_task(client.get(f"http://127.0.0.1:{port}/"))
        while not server.server_state.tasks:
            await asyncio.sleep(0.01)
        server.should_exit = True
        response = await asking
    await serving
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "frontend_draining"
    assert response.headers["retry-after"] == "1"
