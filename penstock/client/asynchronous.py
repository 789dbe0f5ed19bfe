"""AsyncClient: a running service for asyncio, with the methods of Client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import httpx2

from penstock.client.answer import Answer, Delta
from penstock.client.core import BaseClient, BaseStream, Core
from penstock.client.http import Call, Caller, OnRecovery, connections
from penstock.client.reading import Reading
from penstock.client.requests import Endpoints


class AsyncStream(BaseStream):
    """An answer as it is generated: an iterator of its deltas.

    A connection that is lost, a frontend or a worker that dies, are passed over: each token comes
    once, in order. Leaving it before its end (`aclose`, the end of an `async with`) cancels the job
    that it submitted. For one task.
    """

    def __init__(self, reading: Reading, deltas: AsyncGenerator[Delta, None]) -> None:
        super().__init__(reading)
        self._deltas = deltas

    async def result(self) -> Answer:
        """Reads to the end; returns the whole answer. Raises PenstockError."""
        async for _ in self:
            pass
        return self.answer

    async def aclose(self) -> None:
        """Ends the connection, and cancels the job where this stream submitted it. Idempotent."""
        await self._deltas.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class _AsyncIO:
    """Connections of an event loop."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def request(self, call: Call) -> httpx2.Response:
        return await self._http.request(**call)

    def stream(self, call: Call) -> AbstractAsyncContextManager[httpx2.Response]:
        return self._http.stream(**call)

    async def read(self, response: httpx2.Response) -> bytes:
        return await response.aread()

    def events(self, response: httpx2.Response) -> AsyncIterator[httpx2.ServerSentEvent]:
        return aiter(httpx2.EventSource(response, max_event_size=None))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AsyncClient(Core, BaseClient[AsyncStream]):
    """A running service, for the tasks of one event loop; `aclose` it, or use `async with`."""

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        key: str | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 60.0,
        http: httpx2.AsyncClient | None = None,
        on_recovery: OnRecovery | None = None,
    ) -> None:
        """Takes the URLs of one or several frontends: another one is asked when one is away.

        Without them PENSTOCK_URL has them, without a `key` PENSTOCK_KEY. Requests
        and streams fail after `patience_s` without a success, when each URL was tried; with 0 each
        is tried once. `timeout_s`: without a byte of a response that is no
        stream. `http`: connections of the caller's own, such as with other certificates; it closes
        them. `on_recovery` is called, within a read of a stream, with each event of the type
        `recovery`: its job has lost its worker, or another one has resumed it. Raises ValueError
        for an invalid URL.
        """
        places = Endpoints(urls)
        self._http = http or httpx2.AsyncClient(**connections(places))
        self._owns_http = http is None
        super().__init__(
            _AsyncIO(self._http), places, Caller(key, timeout_s, on_recovery), patience_s
        )

    def _stream(self, reading: Reading) -> AsyncStream:
        return AsyncStream(reading, self._deltas(reading))

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
