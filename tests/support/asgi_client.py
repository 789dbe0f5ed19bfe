"""A blocking HTTP client of an app that runs on another thread's loop, without sockets.

For what the app decides by itself: what a request must look like, what is refused and how. What
depends on the HTTP server (framing, disconnects, buffers) needs a socket.
"""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

TIMEOUT_S = 60.0


class AppTransport(httpx.BaseTransport):
    """Calls the app on its loop. A response is returned when it is complete."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        self._app = httpx.ASGITransport(app)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises what the app raises, and TimeoutError."""
        request.read()
        return asyncio.run_coroutine_threadsafe(self._call(request), self._loop).result(TIMEOUT_S)

    async def _call(self, request: httpx.Request) -> httpx.Response:
        response = await self._app.handle_async_request(request)
        content = await response.aread()
        return httpx.Response(response.status_code, headers=response.headers, content=content)


def asgi_client(app: FastAPI, loop: asyncio.AbstractEventLoop) -> httpx.Client:
    return httpx.Client(transport=AppTransport(app, loop), base_url="http://localhost")
