"""AsyncClient: a running service for asyncio, with the methods of Client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any

import httpx2

from penstock.client.answer import Answer, Delta
from penstock.client.errors import PenstockError, StreamLost, refusal
from penstock.client.http import Caller, connections, reaching, read_event, read_json
from penstock.client.reading import BackgroundReading, LogReading, Reading, SubmittedReading
from penstock.client.requests import (
    IDEMPOTENCY_KEY,
    LEAVING_S,
    Event,
    Opened,
    Places,
    Request,
    Tries,
    background,
    first_model,
    in_path,
    limited,
    new_key,
    turns_of,
)


class AsyncStream:
    """An answer as it is generated: an iterator of its deltas.

    A connection that is lost, a frontend or a worker that dies, are passed over: each token comes
    once, in order. Leaving it before its end (`aclose`, the end of an `async with`) cancels the job
    that it submitted. For one task.
    """

    def __init__(self, client: AsyncClient, reading: Reading) -> None:
        self._reading = reading
        self._deltas = _read(client, reading)

    @property
    def job_id(self) -> str:
        """The id of the job, "" before the service has named it."""
        return self._reading.job_id

    @property
    def answer(self) -> Answer:
        """The answer read so far."""
        return self._reading.answer

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


async def _read(client: AsyncClient, reading: Reading) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of a stream, which it does not refer to: so it ends with it."""
    try:
        if reading.needs_model:
            reading.choose(await client.model())
        tries = client.tries()
        while not reading.is_over:
            try:
                async with aclosing(client.connect(reading.request(), tries.url)) as events:
                    async for event in events:
                        if isinstance(event, Opened):
                            tries.opened()
                            reading.opened(event.request_id)
                            continue
                        if reading.is_over:
                            continue  # to its end, so that the connection can be used again
                        deltas = reading.take(event)
                        tries.succeeded()
                        for delta in deltas:
                            yield delta
                if not reading.is_over:
                    raise reading.ended_early()
            except PenstockError as error:
                if not reading.is_over:
                    if isinstance(error, StreamLost):
                        await _cancel(client, reading)  # the job that the repeated request began
                    await asyncio.sleep(tries.failed(error, may_pass=reading.may_pass(error)))
    except PenstockError as error:
        error.job_id = error.job_id or reading.job_id
        raise
    except BaseException:
        await _cancel(client, reading)
        raise
    if reading.failure is not None:
        raise reading.failure


async def _cancel(client: AsyncClient, reading: Reading) -> None:
    if reading.cancels and reading.job_id and not reading.is_over:
        with suppress(PenstockError):  # its deadline ends it then
            path = f"/v1/jobs/{in_path(reading.job_id)}"
            await client.call("DELETE", path, patience_s=LEAVING_S)


class AsyncClient:
    """A running service, for the tasks of one event loop; `aclose` it, or use `async with`."""

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        key: str | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 60.0,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        """Takes the URLs of one or several frontends: another one is asked when one is away.

        Without them PENSTOCK_URL has them, without a `key` PENSTOCK_KEY. Requests
        and streams fail after `patience_s` without a success, when each URL was tried; with 0 each
        is tried once. `timeout_s`: without a byte of a response that is no
        stream. `http`: connections of the caller's own, such as with other certificates; it closes
        them. Raises ValueError for an invalid URL.
        """
        self._places = Places(urls)
        self._patience_s = patience_s
        self._caller = Caller(key, timeout_s)
        self._http = http or httpx2.AsyncClient(**connections(self._places))
        self._owns_http = http is None

    @property
    def url(self) -> str:
        """The frontend that is asked next."""
        return self._places.url

    # Answers.

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Any,
    ) -> AsyncStream:
        """Returns the stream of a chat completion: of messages, or of one question.

        Without a `model` it is the first that is served. `parameters` are those of
        `/v1/chat/completions`; the limit of tokens is `max_tokens` in every method. The same
        request with the same `idempotency_key` is the same answer.
        """
        options = {"stream_options": {"include_usage": True}, **parameters}
        body = {**options, "messages": turns_of(messages)}
        return self._submitted("/v1/chat/completions", body, model, idempotency_key)

    def complete(
        self,
        prompt: Any,
        *,
        model: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Any,
    ) -> AsyncStream:
        """Returns the stream of a completion; `parameters` are those of `/v1/completions`."""
        body = {"stream_options": {"include_usage": True}, **parameters, "prompt": prompt}
        return self._submitted("/v1/completions", body, model, idempotency_key)

    def generate(
        self,
        prompt: Any,
        *,
        model: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Any,
    ) -> AsyncStream:
        """Returns the stream of the native API, whose deltas have `token_ids`; `parameters` are
        those of `/generate`."""
        return self._submitted(
            "/generate", {**parameters, "prompt": prompt}, model, idempotency_key
        )

    def _submitted(
        self, path: str, body: dict[str, Any], model: str | None, key: str | None
    ) -> AsyncStream:
        limits = limited(path, body)
        named = {**limits, "model": model} if model else limits
        return AsyncStream(self, SubmittedReading(path, named, key=key, needs_model=model is None))

    # Jobs in the background.

    async def submit(self, input: Any, *, model: str | None = None, **parameters: Any) -> str:
        """Submits a job that belongs to no connection; returns its id at once.

        `input` and `parameters` are those of `/v1/responses`, with `max_tokens` for
        `max_output_tokens`. Raises PenstockError.
        """
        body = background(input, model or await self.model(), parameters)
        return str(
            (await self.call("POST", "/v1/responses", body, idempotency_key=new_key()))["id"]
        )

    def follow(self, job_id: str, *, raw: bool = False, after: str = "") -> AsyncStream:
        """Returns the stream of a submitted job, from its start.

        Leaving it does not cancel the job. `raw`, and jobs that `submit` did not make: the text as
        the model wrote it, its reasoning and calls in it, after the event id `after`.
        """
        if raw or after or not job_id.startswith("resp_"):
            return AsyncStream(self, LogReading(job_id, after))
        return AsyncStream(self, BackgroundReading(job_id))

    async def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job's state, place in the queue, times, tokens, worker. Raises NotFound."""
        return dict(await self.call("GET", f"/v1/jobs/{in_path(job_id)}"))

    async def jobs(self, *, state: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Returns jobs, newest first. Raises PenstockError."""
        return list(
            (await self.call("GET", "/v1/jobs", query={"state": state, "limit": limit}))["data"]
        )

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job in any state; returns it as it ended. Idempotent. Raises NotFound."""
        return dict(await self.call("DELETE", f"/v1/jobs/{in_path(job_id)}"))

    # Everything else.

    async def model(self) -> str:
        """Returns the first model with a live worker, else the first one. Raises PenstockError."""
        return first_model((await self.call("GET", "/v1/models"))["data"])

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        accepted: tuple[int, ...] = (),
        patience_s: float | None = None,
    ) -> Any:
        """Returns the JSON of a response, of a status in `accepted` too. Raises PenstockError.

        It is tried again for `patience_s`, by default the client's, and at each URL once. A POST
        that was sent is sent again only with an `idempotency_key`.
        """
        headers = {IDEMPOTENCY_KEY: idempotency_key} if idempotency_key else {}
        request = Request(method, path, body, query or {}, headers)
        tries = self.tries(patience_s)
        while True:
            try:
                with reaching(tries.url):
                    response = await self._http.request(**self._caller.call(request, tries.url))
                return read_json(response, tries.url, accepted)
            except PenstockError as error:
                await asyncio.sleep(tries.failed(error, may_pass=request.may_repeat(error)))

    async def events(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Yields the JSON of the events of one connection, which is not resumed. Raises
        PenstockError."""
        async for event in self.connect(Request(method, path, body, query or {}), self.url):
            if isinstance(event, Event):
                yield event.data

    async def connect(self, request: Request, url: str) -> AsyncGenerator[Opened | Event, None]:
        """Yields that the response begins, then its events; where it can have none, one that is the
        end. Raises PenstockError."""
        with reaching(url):
            async with self._http.stream(**self._caller.stream(request, url)) as response:
                if response.status_code >= 400:
                    content = await response.aread()
                    raise refusal(response.status_code, content, response.headers, url)
                if response.status_code == 204:
                    yield Event("", None)
                    return
                yield Opened(response.headers.get("x-request-id", ""))
                async for event in httpx2.EventSource(response, max_event_size=None):
                    yield read_event(event, url)

    def tries(self, patience_s: float | None = None) -> Tries:
        """Returns the tries of a new request."""
        return Tries(self._places, self._patience_s if patience_s is None else patience_s)

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
