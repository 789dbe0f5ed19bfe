"""penstock.client over connections that a test scripts: repeats, errors, pauses, leaving."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.client import (
    AsyncClient,
    AsyncStream,
    Client,
    Gone,
    InvalidRequest,
    JobCancelled,
    JobExpired,
    JobFailed,
    NotFound,
    NotPermitted,
    Overloaded,
    PenstockError,
    Refused,
    Stream,
    StreamLost,
    Unreachable,
    reading,
)
from penstock.client.requests import Endpoints, Tries
from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[3]
NAME = "chatcmpl-0-1"


def chunk(content: str = "", finish: str | None = None, name: str = NAME, **more: Any) -> Any:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish, **more}
    return {"id": name, "model": "m", "choices": [choice]}


def stream(*events: Any, is_whole: bool = True) -> httpx2.Response:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    done = "data: [DONE]\n\n" if is_whole else "data: {"
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, content=(text + done).encode()
    )


def error(status: int, code: str, kind: str = "server_error", **headers: str) -> httpx2.Response:
    body = {"message": f"{code}, in words.", "type": kind, "code": code, "param": "x"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, json={"error": body}, headers=named)


def failing(code: str, kind: str = "server_error") -> Any:
    return {"error": {"message": f"{code}, in words.", "type": kind, "code": code, "param": None}}


class Service:
    """Answers requests in order with what a test gives; keeps them."""

    def __init__(self, *outcomes: httpx2.Response | Exception) -> None:
        self.requests: list[httpx2.Request] = []
        self._outcomes: Iterator[httpx2.Response | Exception] = iter(outcomes)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        outcome = next(self._outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def asked(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


CUT = httpx2.ReadError("cut")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, none of which is waited for."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return made


def client_of(service: Service, **options: Any) -> Client:
    http = httpx2.Client(transport=httpx2.MockTransport(service))
    return Client("http://one,http://two", http=http, **{"patience_s": 5.0, **options})


def test_a_repeated_answer_adds_what_is_new_alone(pauses: list[float]) -> None:
    service = Service(
        stream(chunk(), chunk("Hel", token_ids=[1, 2]), is_whole=False),
        CUT,
        stream(chunk(), chunk("H", token_ids=[1]), chunk("ello", token_ids=[2, 3]), is_whole=False),
        stream(
            chunk("Hello", token_ids=[1, 2, 3]),
            chunk(", you", token_ids=[4]),
            chunk(finish="stop"),
            {"id": NAME, "choices": [], "usage": {"completion_tokens": 4}},
        ),
    )
    answer = client_of(service).chat("x", model="m")
    deltas = [delta for delta in answer if delta.text or delta.finish_reason]
    assert [delta.text for delta in deltas] == ["Hel", "lo", ", you", ""]
    assert [token for delta in deltas for token in delta.token_ids] == [1, 2, 3, 4]
    whole = answer.answer
    assert (whole.text, whole.choices[0].token_ids) == ("Hello, you", (1, 2, 3, 4))
    assert (whole.choices[0].finish_reason, whole.usage) == ("stop", {"completion_tokens": 4})
    keys = {request.headers["idempotency-key"] for request in service.requests}
    assert len(keys) == 1, "the same request, four times"
    assert {request.url.host for request in service.requests} == {"one", "two"}
    assert json.loads(service.requests[0].content)["on_disconnect"] == "continue"
    assert pauses


def test_calls_reasoning_and_log_probabilities_are_repeated_and_left_out() -> None:
    head = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}

    def call(text: str) -> Any:
        return [{"index": 0, "function": {"arguments": text}}]

    def entries(*names: str) -> Any:
        return {"content": [{"token": name} for name in names]}

    first = [
        chunk(delta={"reasoning_content": "hm"}, logprobs=None),
        chunk("a", logprobs=entries("a")),
        chunk(delta={"tool_calls": [head]}),
        chunk(delta={"tool_calls": call('{"k"')}),
    ]
    again = [
        chunk(delta={"reasoning_content": "hm"}),
        chunk("ab", logprobs=entries("a", "b")),
        chunk(delta={"tool_calls": [head]}),
        chunk(delta={"tool_calls": call('{"k": 1}')}, finish_reason="tool_calls"),
    ]
    service = Service(stream(*first, is_whole=False), stream(*again))
    answer = client_of(service).chat("x", model="m")
    deltas = list(answer)
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert [entry for d in deltas for entry in (d.logprobs or {}).get("content", [])] == (
        entries("a", "b")["content"]
    )
    (made,) = answer.answer.tool_calls
    assert (made["id"], made["function"]) == ("c1", {"name": "f", "arguments": '{"k": 1}'})
    parts = [part["function"]["arguments"] for delta in deltas for part in delta.tool_calls]
    assert parts == ["", '{"k"', ": 1}"]


@pytest.mark.promise(
    "Client: a text that cannot be continued without doubt is an error, never joined"
)
def test_another_text_is_never_joined_to_what_was_delivered() -> None:
    service = Service(
        stream(chunk("Hel"), is_whole=False), stream(chunk("Hal")), httpx2.Response(200, json={})
    )
    answer = client_of(service).chat("x", model="m")
    with pytest.raises(StreamLost):
        answer.result()
    assert answer.answer.text == "Hel"


def test_another_job_is_never_joined_to_what_was_delivered_and_is_cancelled() -> None:
    service = Service(
        stream(chunk("Hel"), is_whole=False),
        stream(chunk("Hello", name="chatcmpl-0-2")),
        httpx2.Response(200, json={}),
    )
    with pytest.raises(StreamLost) as lost:
        client_of(service).chat("x", model="m").result()
    assert lost.value.job_id == NAME
    assert service.asked[-1] == "DELETE /v1/jobs/chatcmpl-0-2"


def test_a_job_that_died_before_its_first_token_is_begun_anew() -> None:
    service = Service(
        stream(chunk(), failing("worker_lost")),
        stream(chunk(), failing("job_lost", "service_unavailable"), is_whole=False),
        stream(chunk(name="chatcmpl-0-2"), chunk("Hello", "stop", name="chatcmpl-0-2")),
    )
    assert client_of(service).chat("x", model="m").result().text == "Hello"


@table(
    ("code", "kind", "raised"),
    [
        ("worker_lost", "server_error", JobFailed),
        ("job_lost", "service_unavailable", StreamLost),
        ("stream_diverged", "server_error", StreamLost),
        ("job_expired", "invalid_request_error", Gone),
        ("cancelled", "cancelled", JobCancelled),
        ("orphaned", "cancelled", JobCancelled),
        ("deadline_exceeded", "timeout", JobExpired),
        ("queue_timeout", "timeout", JobExpired),
        ("nonfinite_logits", "server_error", JobFailed),
    ],
)
def test_how_a_job_ended_is_an_error_with_the_services_words(
    code: str, kind: str, raised: type[PenstockError]
) -> None:
    service = Service(stream(chunk("Hel"), failing(code, kind)))
    answer = client_of(service).chat("x", model="m")
    with pytest.raises(raised) as failed:
        answer.result()
    assert (str(failed.value), failed.value.code) == (f"{code}, in words.", code)
    assert failed.value.job_id == NAME
    assert answer.answer.text == "Hel"
    assert service.asked == ["POST /v1/chat/completions"], "nothing is left to cancel"


@table(
    ("code", "kind"),
    [
        ("frontend_draining", "service_unavailable"),
        ("service_unavailable", "service_unavailable"),
        ("internal_error", "server_error"),
    ],
)
def test_the_end_of_a_stream_is_not_the_end_of_its_job(code: str, kind: str) -> None:
    service = Service(stream(chunk("Hel"), failing(code, kind)), stream(chunk("Hello", "stop")))
    assert client_of(service).chat("x", model="m").result().text == "Hello"


@table(
    ("status", "raised"),
    [
        (400, InvalidRequest),
        (401, NotPermitted),
        (403, NotPermitted),
        (404, NotFound),
        (410, Gone),
        (413, InvalidRequest),
        (429, Overloaded),
        (500, Refused),
        (503, Overloaded),
    ],
)
def test_an_error_response_is_an_error_of_its_kind(
    status: int, raised: type[PenstockError]
) -> None:
    refusals = [error(status, "some_code", x_request_id="r1", retry_after="7") for _ in range(2)]
    service = Service(*refusals)
    with pytest.raises(raised) as refused:
        client_of(service, patience_s=0.0).chat("x", model="m").result()
    found = refused.value
    assert isinstance(found, Refused)
    assert (str(found), found.status, found.code) == ("some_code, in words.", status, "some_code")
    assert (found.kind, found.param, found.request_id) == ("server_error", "x", "r1")
    assert found.retry_after_s == 7.0


def test_what_is_refused_for_good_is_not_sent_again() -> None:
    for response in (error(400, "bad"), error(503, "later", x_should_retry="false")):
        service = Service(response)
        with pytest.raises(Refused):
            client_of(service).chat("x", model="m").result()
        assert len(service.requests) == 1


def test_the_service_says_how_long_to_wait(pauses: list[float]) -> None:
    service = Service(error(503, "server_overloaded", retry_after="3"), stream(chunk("a", "stop")))
    assert client_of(service).chat("x", model="m").result().text == "a"
    assert pauses == [3.0]


def test_a_request_that_may_act_twice_is_sent_once() -> None:
    service = Service(CUT)
    with pytest.raises(Unreachable):
        client_of(service).call("POST", "/v1/batches", {})
    service = Service(CUT, httpx2.Response(200, json={"id": "resp_1"}))
    assert client_of(service).submit("x", model="m") == "resp_1"
    assert json.loads(service.requests[1].content)["background"] is True
    service = Service(CUT, CUT, httpx2.Response(200, json={"data": []}))
    assert client_of(service).jobs(state="running") == []
    assert service.requests[0].url.query == b"state=running&limit=20"


def test_leaving_a_stream_cancels_its_job() -> None:
    def leave_by_break(client: Client) -> None:
        for _ in client.chat("x", model="m"):
            break

    def leave_by_close(client: Client) -> None:
        with client.chat("x", model="m") as answer:
            next(answer)

    def leave_by_error(client: Client) -> None:
        with suppress(ZeroDivisionError), client.chat("x", model="m") as answer:
            next(answer)
            raise ZeroDivisionError

    for leave in (leave_by_break, leave_by_close, leave_by_error):
        service = Service(stream(chunk("a"), chunk("b")), httpx2.Response(200, json={}))
        leave(client_of(service))
        assert service.asked == ["POST /v1/chat/completions", f"DELETE /v1/jobs/{NAME}"]


def test_a_job_that_waits_is_cancelled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    waiting = stream(is_whole=False)
    waiting.headers["x-request-id"] = "gen-0-1"
    service = Service(waiting, httpx2.Response(200, json={}))
    monkeypatch.setattr(time, "sleep", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        client_of(service).generate("x", model="m").result()
    assert service.asked == ["POST /generate", "DELETE /v1/jobs/gen-0-1"]


@pytest.mark.promise("Client: leaving a stream cancels its job, leaving a followed one does not")
def test_leaving_a_job_that_is_followed_cancels_nothing() -> None:
    created = {"type": "response.created", "sequence_number": 0, "response": {"status": "queued"}}
    service = Service(stream(created))
    with client_of(service).follow("resp_0-1") as answer:
        next(answer)
    assert service.asked == ["GET /v1/responses/resp_0-1"]


def test_a_followed_job_resumes_after_the_last_number() -> None:
    def event(number: int, kind: str, **more: Any) -> Any:
        return {"type": f"response.{kind}", "sequence_number": number, **more}

    end = {
        "status": "incomplete",
        "model": "m",
        "usage": {"output_tokens": 3},
        "output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
    }
    interrupted = {"type": "error", "code": "frontend_draining", "message": "down"}
    service = Service(
        stream(event(0, "created", response={}), event(1, "reasoning_text.delta", delta="h")),
        error(404, "job_not_found"),  # lost, and put back in a second
        stream(event(2, "output_text.delta", delta="a"), interrupted),
        stream(event(3, "output_text.delta", delta="b"), event(4, "incomplete", response=end)),
    )
    answer = client_of(service).follow("resp_0-1").result()
    assert [request.url.query for request in service.requests] == [
        b"stream=true",
        *(f"stream=true&starting_after={number}".encode() for number in (1, 1, 2)),
    ]
    (choice,) = answer.choices
    assert (choice.text, choice.reasoning, choice.finish_reason) == ("ab", "h", "length")
    assert answer.tool_calls[0]["function"] == {"name": "f", "arguments": "{}"}
    assert (answer.model, answer.usage) == ("m", {"output_tokens": 3})
    failed = event(0, "failed", response={"status": "cancelled", "error": None})
    with pytest.raises(JobCancelled):
        client_of(Service(stream(failed))).follow("resp_0-1").result()


def with_ids(*events: tuple[str, Any]) -> httpx2.Response:
    text = "".join(
        (f"id: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in events
    )
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, content=text.encode()
    )


def test_a_log_is_read_on_behind_the_last_id() -> None:
    def piece(text: str, **more: Any) -> Any:
        return {"text": text, "token_ids": [len(text)], **more}

    service = Service(
        with_ids(("1-1", piece("a"))),
        with_ids(("2-2", piece("b")), ("", {**piece(""), **failing("service_unavailable")})),
        with_ids(("3-0", piece("", done=True, finish_reason="stop", usage={"x": 1}))),
    )
    answer = client_of(service).follow("gen-0-1").result()
    assert [request.url.query for request in service.requests] == [b"", b"after=1-1", b"after=2-2"]
    assert (answer.text, answer.usage) == ("ab", {"x": 1})
    ended = with_ids(("1-1", piece("a")), ("2-0", {**piece(""), **failing("cancelled")}))
    with pytest.raises(JobCancelled):
        client_of(Service(ended)).follow("gen-0-1").result()
    assert client_of(Service(httpx2.Response(204))).follow("gen-0-1").result().text == ""


def test_the_model_is_the_first_that_is_served() -> None:
    models = [{"id": "waits", "is_served": False}, {"id": "here", "is_served": True}]
    service = Service(httpx2.Response(200, json={"data": models}), stream(chunk("a", "stop")))
    assert client_of(service).chat("x").result().text == "a"
    assert json.loads(service.requests[1].content)["model"] == "here"
    with pytest.raises(PenstockError, match="no model"):
        client_of(Service(httpx2.Response(200, json={"data": []}))).chat("x").result()


def test_the_key_and_the_urls_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "secret")
    monkeypatch.setenv("PENSTOCK_URL", "http://one, http://two/v1")
    service = Service(httpx2.Response(200, json={"id": "x"}))
    client = Client(http=httpx2.Client(transport=httpx2.MockTransport(service)))
    client.job("x")
    assert service.requests[0].headers["authorization"] == "Bearer secret"
    assert Endpoints(None).urls == ("http://one", "http://two")
    assert not Endpoints(None).are_local
    assert Endpoints(["http://127.0.0.1:1", "http://localhost:2"]).are_local


@table("url", ["", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Client([url])


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tries, failure = Tries(Endpoints("http://one,http://two"), 10.0), Unreachable("away")
    first, second = tries.failed(failure), tries.failed(failure)
    assert first == 0.0, "the other frontend is asked at once"
    assert 0.0 < second <= 0.25
    while now[0] < 10.0:
        pause_s = tries.failed(failure)
        assert pause_s <= 5.0
        now[0] += max(pause_s, 0.01)
    with pytest.raises(Unreachable):
        tries.failed(failure)
    tries.succeeded()
    assert tries.failed(failure) == 0.0
    for _ in range(10):  # streams without a token, each of which lasts
        tries.opened()
        now[0] += 8.0
        assert tries.failed(failure) == 0.0


def test_without_patience_each_frontend_is_tried_once(pauses: list[float]) -> None:
    away = httpx2.ConnectError("refused")
    cut_short = stream(chunk("Hel"), is_whole=False)
    service = Service(away, cut_short, stream(chunk("Hello", "stop")))
    with client_of(service, patience_s=0.0) as client:
        assert client.chat("x", model="m").result().text == "Hello"
    service = Service(away, away)
    with client_of(service, patience_s=0.0) as client, pytest.raises(Unreachable, match="//two"):
        client.jobs()
    assert [request.url.host for request in service.requests] == ["one", "two"]
    assert pauses == [0.0, 0.0, 0.0], "none of them waits"


def test_a_post_is_sent_elsewhere_only_where_nothing_was_sent() -> None:
    service = Service(httpx2.ConnectError("refused"), httpx2.Response(200, json={"id": "a"}))
    assert client_of(service).call("POST", "/v1/jobs/a/requeue") == {"id": "a"}
    service = Service(CUT)
    with pytest.raises(Unreachable):
        client_of(service).call("POST", "/v1/jobs/a/requeue")


@pytest.mark.parametrize("given", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_limit_of_tokens_has_one_name_in_every_method(given: str) -> None:
    def body(call: Callable[[Client], object], outcome: httpx2.Response) -> dict[str, Any]:
        service = Service(outcome)
        call(client_of(service))
        sent: dict[str, Any] = json.loads(service.requests[0].content)
        return {name: value for name, value in sent.items() if name.startswith("max_")}

    limit, done = {given: 7}, stream(chunk("a", "stop"))
    taken = body(
        lambda c: c.submit("x", model="m", **limit), httpx2.Response(200, json={"id": "r"})
    )
    assert taken == {"max_output_tokens": 7}
    chat = body(lambda c: c.chat("x", model="m", **limit).result(), done)
    assert chat in ({"max_tokens": 7}, {"max_completion_tokens": 7})
    done = stream(chunk("a", "stop"))
    assert body(lambda c: c.complete("x", model="m", **limit).result(), done) == {"max_tokens": 7}
    done = stream(chunk("a", "stop"))
    assert body(lambda c: c.generate("x", model="m", **limit).result(), done) == {"max_tokens": 7}


async def test_the_client_for_asyncio_does_the_same() -> None:
    service = Service(
        stream(chunk(), chunk("Hel"), is_whole=False), CUT, stream(chunk("Hello", "stop"))
    )
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(service))
    async with AsyncClient("http://one", http=http) as client:
        async with client.chat("x", model="m") as answer:
            texts = [delta.text async for delta in answer]
        assert "".join(texts) == answer.answer.text == "Hello"
    service = Service(stream(chunk("a"), chunk("b")), httpx2.Response(200, json={}))
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(service))
    client = AsyncClient("http://one", http=http)
    async with client.chat("x", model="m") as answer:
        await anext(answer)
    assert service.asked == ["POST /v1/chat/completions", f"DELETE /v1/jobs/{NAME}"]
    await http.aclose()


def test_both_clients_have_the_same_methods() -> None:
    for blocking, asynchronous in ((Client, AsyncClient), (Stream, AsyncStream)):
        methods = {name for name in dir(blocking) if name[0] != "_"} - {"close"}
        assert methods == {name for name in dir(asynchronous) if name[0] != "_"} - {"aclose"}
        for name in methods:
            ours, theirs = getattr(blocking, name), getattr(asynchronous, name)
            if callable(ours):
                parameters = inspect.signature(ours).parameters
                assert list(parameters) == list(inspect.signature(theirs).parameters), name
                assert ours.__doc__, name


async def test_the_blocking_client_serves_a_caller_inside_a_running_event_loop() -> None:
    # Its core is coroutines, which must not meet the loop that runs around them.
    service = Service(stream(chunk("a"), chunk("b")), httpx2.Response(200, json={}))
    answer = client_of(service).chat("x", model="m")
    assert next(answer).text == "a"
    del answer  # left without a close
    assert service.asked == ["POST /v1/chat/completions", f"DELETE /v1/jobs/{NAME}"]


def test_the_end_of_an_event_loop_leaves_streams_of_the_blocking_client_open() -> None:
    service = Service(stream(chunk("a"), chunk("b", "stop")))

    async def begin() -> Stream:
        answer = client_of(service).chat("x", model="m")
        assert next(answer).text == "a"
        return answer

    answer = asyncio.run(begin())
    assert [delta.text for delta in answer] == ["b"]
    assert service.asked == ["POST /v1/chat/completions"]


def test_the_clients_of_both_languages_repeat_the_same_failures() -> None:
    source = (REPOSITORY / "clients/typescript/src/reading.ts").read_text()
    sets = re.findall(r"^const ([A-Z_]+) = new Set\(\[(.*?)\]\);", source, re.M | re.S)
    found = {name: set(re.findall(r"'([\w.]+)'", codes)) for name, codes in sets}
    assert found == {
        "BEGINS_ANEW": reading._BEGINS_ANEW,
        "LOST": reading._LOST,
        "PASSING_KINDS": reading._PASSING_KINDS,
        "ENDS": {f"response.{end}" for end in reading._ENDS},
    }
