"""Client: a running service for programs that wait. AsyncClient has the same methods."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
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


class Stream:
    """An answer as it is generated: an iterator of its deltas.

    A connection that is lost, a frontend or a worker that dies, are passed over: each token comes
    once, in order. Leaving it before its end (`close`, the end of a `with`, an exception) cancels
    the job that it submitted. Not safe for several threads.
    """

    def __init__(self, client: Client, reading: Reading) -> None:
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


def _read(client: Client, reading: Reading) -> Generator[Delta, None, None]:
    """Yields the deltas of a stream, which it does not refer to: so it ends with it."""
    try:
        if reading.needs_model:
            reading.choose(client.model())
        tries = client.tries()
        while not reading.is_over:
            try:
                with closing(client.connect(reading.request(), tries.url)) as events:
                    for event in events:
                        if isinstance(event, Opened):
                            tries.opened()
                            reading.opened(event.request_id)
                            continue
                        if reading.is_over:
                            continue  # to its end, so that the connection can be used again
                        deltas = reading.take(event)
                        tries.succeeded()
                        yield from deltas
                if not reading.is_over:
                    raise reading.ended_early()
            except PenstockError as error:
                if not reading.is_over:
                    if isinstance(error, StreamLost):
                        _cancel(client, reading)  # the job that the repeated request began
                    time.sleep(tries.failed(error, may_pass=reading.may_pass(error)))
    except PenstockError as error:
        error.job_id = error.job_id or reading.job_id
        raise
    except BaseException:
        _cancel(client, reading)
        raise
    if reading.failure is not None:
        raise reading.failure


def _cancel(client: Client, reading: Reading) -> None:
    if reading.cancels and reading.job_id and not reading.is_over:
        with suppress(PenstockError):  # its deadline ends it then
            path = f"/v1/jobs/{in_path(reading.job_id)}"
            client.call("DELETE", path, patience_s=LEAVING_S)


class Client:
    """A running service. Safe for several threads; `close` it, or use it in a `with`."""

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        key: str | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 60.0,
        http: httpx2.Client | None = None,
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
        self._http = http or httpx2.Client(**connections(self._places))
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
    ) -> Stream:
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
    ) -> Stream:
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
    ) -> Stream:
        """Returns the stream of the native API, whose deltas have `token_ids`; `parameters` are
        those of `/generate`."""
        return self._submitted(
            "/generate", {**parameters, "prompt": prompt}, model, idempotency_key
        )

    def _submitted(
        self, path: str, body: dict[str, Any], model: str | None, key: str | None
    ) -> Stream:
        limits = limited(path, body)
        named = {**limits, "model": model} if model else limits
        return Stream(self, SubmittedReading(path, named, key=key, needs_model=model is None))

    # Jobs in the background.

    def submit(self, input: Any, *, model: str | None = None, **parameters: Any) -> str:
        """Submits a job that belongs to no connection; returns its id at once.

        `input` and `parameters` are those of `/v1/responses`, with `max_tokens` for
        `max_output_tokens`. Raises PenstockError.
        """
        body = background(input, model or self.model(), parameters)
        return str(self.call("POST", "/v1/responses", body, idempotency_key=new_key())["id"])

    def follow(self, job_id: str, *, raw: bool = False, after: str = "") -> Stream:
        """Returns the stream of a submitted job, from its start.

        Leaving it does not cancel the job. `raw`, and jobs that `submit` did not make: the text as
        the model wrote it, its reasoning and calls in it, after the event id `after`.
        """
        if raw or after or not job_id.startswith("resp_"):
            return Stream(self, LogReading(job_id, after))
        return Stream(self, BackgroundReading(job_id))

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job's state, place in the queue, times, tokens, worker. Raises NotFound."""
        return dict(self.call("GET", f"/v1/jobs/{in_path(job_id)}"))

    def jobs(self, *, state: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Returns jobs, newest first. Raises PenstockError."""
        return list(self.call("GET", "/v1/jobs", query={"state": state, "limit": limit})["data"])

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job in any state; returns it as it ended. Idempotent. Raises NotFound."""
        return dict(self.call("DELETE", f"/v1/jobs/{in_path(job_id)}"))

    # Everything else.

    def model(self) -> str:
        """Returns the first model with a live worker, else the first one. Raises PenstockError."""
        return first_model(self.call("GET", "/v1/models")["data"])

    def call(
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
                    response = self._http.request(**self._caller.call(request, tries.url))
                return read_json(response, tries.url, accepted)
            except PenstockError as error:
                time.sleep(tries.failed(error, may_pass=request.may_repeat(error)))

    def events(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None
    ) -> Generator[Any, None, None]:
        """Yields the JSON of the events of one connection, which is not resumed. Raises
        PenstockError."""
        for event in self.connect(Request(method, path, body, query or {}), self.url):
            if isinstance(event, Event):
                yield event.data

    def connect(self, request: Request, url: str) -> Generator[Opened | Event, None, None]:
        """Yields that the response begins, then its events; where it can have none, one that is the
        end. Raises PenstockError."""
        with (
            reaching(url),
            self._http.stream(**self._caller.stream(request, url)) as response,
        ):
            if response.status_code >= 400:
                raise refusal(response.status_code, response.read(), response.headers, url)
            if response.status_code == 204:
                yield Event("", None)
                return
            yield Opened(response.headers.get("x-request-id", ""))
            for event in httpx2.EventSource(response, max_event_size=None):
                yield read_event(event, url)

    def tries(self, patience_s: float | None = None) -> Tries:
        """Returns the tries of a new request."""
        return Tries(self._places, self._patience_s if patience_s is None else patience_s)

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
