"""Client: a running service for programs that wait. AsyncClient has the same methods."""

from __future__ import annotations

import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx2

from penstock.client.answer import Answer, Delta
from penstock.client.core import BaseClient, BaseStream, Core
from penstock.client.http import Call, Caller, OnRecovery, connections
from penstock.client.reading import Reading
from penstock.client.requests import Endpoints

T = TypeVar("T")
P = ParamSpec("P")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine of the core, whose IO blocks, so that it never suspends.

    A caller's event loop is kept from the core's generators: it would close them at its end.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    coroutine.close()
    raise RuntimeError("a coroutine of the blocking client was suspended")


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await items.__anext__()


def _iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yields what a generator of the core yields, and closes that one with itself."""
    try:
        while True:
            try:
                item = _run(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        _run(items.aclose())


def _blocking(
    method: Callable[Concatenate[Core, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def run(self: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _run(method(self._core, *arguments, **options))

    return run


def _iterating(
    method: Callable[Concatenate[Core, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    @wraps(method)
    def iterate(
        self: Client, /, *arguments: P.args, **options: P.kwargs
    ) -> Generator[T, None, None]:
        return _iterate(method(self._core, *arguments, **options))

    return iterate


class Stream(BaseStream):
    """An answer as it is generated: an iterator of its deltas.

    A connection that is lost, a frontend or a worker that dies, are passed over: each token comes
    once, in order. Leaving it before its end (`close`, the end of a `with`, an exception) cancels
    the job that it submitted. Not safe for several threads.
    """

    def __init__(self, reading: Reading, deltas: Generator[Delta, None, None]) -> None:
        super().__init__(reading)
        self._deltas = deltas

    def result(self) -> Answer:
        """Reads to the end; returns the whole answer. Raises PenstockError."""
        for _ in self:
            pass
        return self.answer

    def close(self) -> None:
        """Ends the connection, and cancels the job where this stream submitted it. Idempotent."""
        self._deltas.close()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Ready(AsyncIterator[T]):
    """An iterator as the core awaits it. Its items are read while the caller waits."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> T:
        for item in self._items:
            return item
        raise StopAsyncIteration


class _BlockingIO:
    """Connections of a thread that waits for them."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    async def request(self, call: Call) -> httpx2.Response:
        return self._http.request(**call)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[httpx2.Response]:
        with self._http.stream(**call) as response:
            yield response

    async def read(self, response: httpx2.Response) -> bytes:
        return response.read()

    def events(self, response: httpx2.Response) -> AsyncIterator[httpx2.ServerSentEvent]:
        return _Ready(httpx2.EventSource(response, max_event_size=None))

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  (no event loop runs it)


class Client(BaseClient[Stream]):
    """A running service. Safe for several threads; `close` it, or use it in a `with`."""

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        key: str | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 60.0,
        http: httpx2.Client | None = None,
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
        self._places = Endpoints(urls)
        self._http = http or httpx2.Client(**connections(self._places))
        self._owns_http = http is None
        io = _BlockingIO(self._http)
        self._core = Core(io, self._places, Caller(key, timeout_s, on_recovery), patience_s)

    submit = _blocking(Core.submit)
    job = _blocking(Core.job)
    jobs = _blocking(Core.jobs)
    cancel = _blocking(Core.cancel)
    embed = _blocking(Core.embed)
    model = _blocking(Core.model)
    call = _blocking(Core.call)
    events = _iterating(Core.events)

    def _stream(self, reading: Reading) -> Stream:
        return Stream(reading, _iterate(self._core._deltas(reading)))

    def close(self) -> None:
        """Closes the connections."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
