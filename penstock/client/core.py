"""The core of both clients: requests, retries, resume, and how a stream is read.

It is written once, as coroutines that await nothing but an `IO`. AsyncClient awaits them. Client
runs them over an IO that blocks inside its calls: they never suspend and need no event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, Generic, Protocol, TypeVar

import httpx2

from penstock.client.answer import Answer, Delta
from penstock.client.errors import PenstockError, StreamLost, refusal
from penstock.client.http import RECOVERY, Call, Caller, reaching, read_event, read_json
from penstock.client.reading import BackgroundReading, LogReading, Reading, SubmittedReading
from penstock.client.requests import (
    IDEMPOTENCY_KEY,
    LEAVING_S,
    Endpoints,
    Event,
    Opened,
    Request,
    Tries,
    background,
    first_model,
    in_path,
    limited,
    new_key,
    turns_of,
)

StreamT = TypeVar("StreamT")


class IO(Protocol):
    """The connections of one client, and its pauses."""

    async def request(self, call: Call) -> httpx2.Response:
        """Returns a response with its whole body."""
        ...

    def stream(self, call: Call) -> AbstractAsyncContextManager[httpx2.Response]:
        """Returns a response whose body is not read yet, while its context lasts."""
        ...

    async def read(self, response: httpx2.Response) -> bytes:
        """Reads the rest of a body."""
        ...

    def events(self, response: httpx2.Response) -> AsyncIterator[httpx2.ServerSentEvent]:
        """Returns the events of a stream as they arrive."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits before the next try."""
        ...


MAX_INPUTS = 32  # of a request of `embed`: the service takes 300,000 tokens in one


class Core:
    """A running service: requests to it, retried where that helps, and its responses."""

    def __init__(self, io: IO, places: Endpoints, caller: Caller, patience_s: float) -> None:
        self._io = io
        self._places = places
        self._caller = caller
        self._patience_s = patience_s

    async def submit(self, /, input: Any, *, model: str | None = None, **parameters: Any) -> str:
        """Submits a job that belongs to no connection; returns its id at once.

        `input` and `parameters` are those of `/v1/responses`, with `max_tokens` for
        `max_output_tokens`. Raises PenstockError.
        """
        body = background(input, model or await self.model(), parameters)
        created = await self.call("POST", "/v1/responses", body, idempotency_key=new_key())
        return str(created["id"])

    async def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job's state, place in the queue, times, tokens, worker. Raises NotFound."""
        return dict(await self.call("GET", f"/v1/jobs/{in_path(job_id)}"))

    async def jobs(self, *, state: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Returns jobs, newest first. Raises PenstockError."""
        found = await self.call("GET", "/v1/jobs", query={"state": state, "limit": limit})
        return list(found["data"])

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job in any state; returns it as it ended. Idempotent. Raises NotFound."""
        return dict(await self.call("DELETE", f"/v1/jobs/{in_path(job_id)}"))

    async def embed(
        self,
        input: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """Returns the vector of each text, or of each list of token ids; of one text a list of one.

        They are sent in requests of MAX_INPUTS, one after the other. Without a `model` it is the
        first that makes embeddings. Raises PenstockError.
        """
        if model is None:
            model = first_model((await self.call("GET", "/v1/models"))["data"], embeds=True)
        options = {} if dimensions is None else {"dimensions": dimensions}
        inputs = [input] if isinstance(input, str) else input
        vectors: list[list[float]] = []
        for begin in range(0, len(inputs), MAX_INPUTS):
            body = {**options, "model": model, "input": list(inputs[begin : begin + MAX_INPUTS])}
            answer = await self.call("POST", "/v1/embeddings", body, idempotency_key=new_key())
            vectors += [one["embedding"] for one in answer["data"]]
        return vectors

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
        tries = Tries(self._places, self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                with reaching(tries.url):
                    response = await self._io.request(self._caller.call(request, tries.url))
                return read_json(response, tries.url, accepted)
            except PenstockError as error:
                await self._io.sleep(tries.failed(error, may_pass=request.may_repeat(error)))

    async def events(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Yields the JSON of the events of one connection, which is not resumed. Raises
        PenstockError."""
        request = Request(method, path, body, query or {})
        async with aclosing(self._connect(request, self._places.url)) as events:
            async for event in events:
                if isinstance(event, Event):
                    yield event.data

    async def _connect(self, request: Request, url: str) -> AsyncGenerator[Opened | Event, None]:
        """Yields that the response has started, then its events; one that is the end where it has
        no body. Raises PenstockError."""
        with reaching(url):
            async with self._io.stream(self._caller.stream(request, url)) as response:
                if response.status_code >= 400:
                    content = await self._io.read(response)
                    raise refusal(response.status_code, content, response.headers, url)
                if response.status_code == 204:
                    yield Event("", None)
                    return
                yield Opened(response.headers.get("x-request-id", ""))
                async for event in self._io.events(response):
                    told = read_event(event, url)
                    if event.event == RECOVERY and self._caller.on_recovery is not None:
                        self._caller.on_recovery(told.data)
                    else:
                        yield told

    async def _deltas(self, reading: Reading) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of an answer. Raises PenstockError.

        Closed before the end, it cancels the job that the answer submitted.
        """
        try:
            if reading.needs_model:
                reading.choose(await self.model())
            tries = Tries(self._places, self._patience_s)
            while not reading.is_over:
                try:
                    connection = self._connect(reading.request(), tries.url)
                    async with aclosing(connection) as events:
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
                            await self._leave(reading)  # the job that the repeated request started
                        pause_s = tries.failed(error, may_pass=reading.may_pass(error))
                        await self._io.sleep(pause_s)
        except PenstockError as error:
            error.job_id = error.job_id or reading.job_id
            raise
        except BaseException:
            await self._leave(reading)
            raise
        if reading.failure is not None:
            raise reading.failure

    async def _leave(self, reading: Reading) -> None:
        if reading.cancels and reading.job_id and not reading.is_over:
            with suppress(PenstockError):  # its deadline ends it then
                path = f"/v1/jobs/{in_path(reading.job_id)}"
                await self.call("DELETE", path, patience_s=LEAVING_S)


class BaseStream:
    """The part of a stream that needs no IO."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    def job_id(self) -> str:
        """The id of the job, "" before the service has named it."""
        return self._reading.job_id

    @property
    def answer(self) -> Answer:
        """The answer read so far."""
        return self._reading.answer


class BaseClient(ABC, Generic[StreamT]):
    """The methods that return a stream, which connects when it is read."""

    _places: Endpoints

    @property
    def url(self) -> str:
        """The frontend that is asked next."""
        return self._places.url

    @abstractmethod
    def _stream(self, reading: Reading) -> StreamT:
        """Returns the stream of an answer."""

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Any,
    ) -> StreamT:
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
    ) -> StreamT:
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
    ) -> StreamT:
        """Returns the stream of the native API, whose deltas have `token_ids`; `parameters` are
        those of `/generate`."""
        return self._submitted(
            "/generate", {**parameters, "prompt": prompt}, model, idempotency_key
        )

    def follow(self, job_id: str, *, raw: bool = False, after: str = "") -> StreamT:
        """Returns the stream of a submitted job, from its start.

        Leaving it does not cancel the job. `raw`, and jobs that `submit` did not make: the text as
        the model wrote it, its reasoning and calls in it, after the event id `after`.
        """
        if raw or after or not job_id.startswith("resp_"):
            return self._stream(LogReading(job_id, after))
        return self._stream(BackgroundReading(job_id))

    def _submitted(
        self, path: str, body: dict[str, Any], model: str | None, key: str | None
    ) -> StreamT:
        limits = limited(path, body)
        named = {**limits, "model": model} if model else limits
        return self._stream(SubmittedReading(path, named, key=key, needs_model=model is None))
