"""Each promise that holds in every dialect, once, over the table of tests.support.dialects."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.dialects import DIALECTS, Dialect
from tests.support.redis_server import new_namespace
from tests.support.running_service import RunningService, running_frontend, running_service
from tests.support.sse_readers import payloads
from tests.support.table import table

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
PROMPT = "The keeper counts to sixty, héllo 😀."
JSON = {"content-type": "application/json"}
# Other paths of a dialect's errors.
ENDS = {"chat": "/", "completions": "/", "responses": "/", "messages": ("/", "/count_tokens")}
CREATED = re.compile(rb'"created(_at)?":\d+')  # is of the request
ORIGIN = "http://localhost:3000"


@every_dialect
def test_a_stream_put_together_is_the_whole_answer(
    client: httpx.Client, service: RunningService, dialect: Dialect
) -> None:
    said = service.text.tokenizer.encode(PROMPT, add_special_tokens=False)
    service.script.says, service.script.cached_tokens = said, 8
    num_tokens = len(said) + 3
    whole = dialect.answer(client, PROMPT, max_tokens=num_tokens)
    streamed = dialect.answer(client, PROMPT, max_tokens=num_tokens, stream=True)
    assert streamed == replace(whole, id=streamed.id)
    assert whole.text == PROMPT + service.text.tokenizer.decode(said[:3])
    assert whole.stop == dialect.stops["limit"]
    first, second = (seen.job for seen in service.worker.seen)
    assert first.prompt_token_ids == second.prompt_token_ids
    counts = (whole.prompt_tokens, whole.cached_tokens, whole.completion_tokens)
    assert counts == (len(first.prompt_token_ids), 8, num_tokens)
    assert [whole.id, streamed.id] == [dialect.prefix + job.job_id for job in (first, second)]


@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_has_the_name_of_its_job(
    client: httpx.Client, dialect: Dialect, streamed: bool
) -> None:
    own = {"x-client-request-id": ("mine-é-7" + "x" * 600).encode(), "x-request-id": b"theirs"}
    path = dialect.path if dialect.name == "generate" else dialect.path + "/"  # both are served
    response = client.post(path, json=dialect.body(stream=streamed), headers=own)
    name = response.headers["x-request-id"]
    job = client.get(f"/v1/jobs/{name}").json()
    assert (job["id"], job["kind"]) == (name, dialect.kind)
    assert job["client_request_id"].startswith("mine-")
    assert job["client_request_id"].isprintable()
    assert len(job["client_request_id"]) <= 512
    assert (job["status"], job["usage"]["completion_tokens"]) == ("finished", 4)
    if streamed:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
    else:
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.json()["id"] == name
    if dialect.name == "messages":
        assert response.headers["request-id"] == name


@pytest.mark.promise("Chat: `stop` for ends and stop strings, `length` for limits")
@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_says_why_it_stopped(
    client: httpx.Client, service: RunningService, dialect: Dialect, streamed: bool
) -> None:
    said = service.text.tokenizer.encode("The keeper counts.", add_special_tokens=False)
    service.script.says = [*said, service.card.eos_token_ids[0]]
    asked: dict[str, Any] = {"max_tokens": 60, "stream": streamed}
    whole = dialect.answer(client, **asked)
    assert (whole.text, whole.stop) == ("The keeper counts.", dialect.stops["token"])
    for stop in ([" counts"], ["nothing", "x", "y", " counts"]):
        cut = dialect.answer(client, **asked, stop=stop)
        assert (cut.text, cut.stop) == ("The keeper", dialect.stops["string"])
        if dialect.name != "responses":  # it has no member for it
            assert cut.stop_string == " counts"
    limited = dialect.answer(client, **asked | {"max_tokens": 3})
    assert (limited.completion_tokens, limited.stop) == (3, dialect.stops["limit"])
    assert limited.stop_string is None


@every_dialect
def test_a_job_that_fails_is_an_error_streamed_and_whole(
    client: httpx.Client, service: RunningService, dialect: Dialect
) -> None:
    service.script.stop_after = 2
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.NONFINITE_LOGITS, Usage(5, 2), message="not a number"
    )
    whole = dialect.post(client, max_tokens=20)
    assert whole.headers["x-should-retry"] == "false"
    error = dialect.error(whole, 500, "server_error")
    assert error == ("not a number", None, "nonfinite_logits")
    stream = dialect.post(client, max_tokens=20, stream=True)
    assert stream.status_code == 200
    assert dialect.failure(stream.content, "server_error") == error
    assert "".join(map(dialect.piece, payloads(stream.content)[:-1]))


@pytest.mark.promise("Chat: `[DONE]` is last, however the stream ends")
@every_dialect
@pytest.mark.parametrize(
    ("kind", "code"),
    [("cancelled", "cancelled"), ("service_unavailable", "frontend_draining")],
)
def test_a_stream_that_is_ended_from_outside_ends_with_an_error_not_a_stop(
    client: httpx.Client, service: RunningService, dialect: Dialect, kind: str, code: str
) -> None:
    service.script.step_s = 0.2
    body = dialect.body(stream=True, max_tokens=400)
    with client.stream("POST", dialect.path, json=body) as response:
        parts = response.iter_raw()
        received = next(parts)
        job = f"/v1/jobs/{response.headers['x-request-id']}"
        if code == "frontend_draining":
            service.loop.call_soon_threadsafe(service.app.state.open_requests.cut_all)
            received += b"".join(parts)
        first, again = (client.delete(job).json() for _ in range(2))
        received += b"".join(parts)
    assert first == again
    assert first["status"] == "cancelled"
    assert dialect.failure(received, kind).code == code
    assert b'"finish_reason":"' not in received
    assert b'"stop_reason":"' not in received


@every_dialect
def test_a_stream_is_kept_alive_while_it_waits_and_while_it_runs(
    service: RunningService, dialect: Dialect
) -> None:
    service.script.says = service.text.tokenizer.encode("@", add_special_tokens=False)
    service.script.step_s = 0.25
    service.park()
    body = dialect.body(stream=True)
    received = b""
    with httpx.stream("POST", service.base_url + dialect.path, json=body, timeout=60) as response:
        for part in response.iter_raw():
            received += part
            if received.count(b": ka\n\n") >= 2:
                service.script.pulls = True
    waiting, _, running = received.partition(b"@")
    if dialect.name == "messages":
        waiting, _, started = waiting.partition(b"event: message_start\n")
        assert set(waiting.split(b"\n\n")) == {b": ka", b""}
        assert b": ka" not in started + running
    assert waiting.count(b": ka\n\n") >= 2
    assert dialect.keepalive in running


@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
def test_the_same_request_under_the_same_key_is_the_same_job(
    client: httpx.Client, service: RunningService, dialect: Dialect, streamed: bool
) -> None:
    service.script.cached_tokens = 4
    key = {"idempotency-key": f"{dialect} {streamed}"}
    body = dialect.body(PROMPT, stream=streamed)
    first = client.post(dialect.path, json=body, headers=key)
    service.script.cached_tokens = 0
    again = client.post(dialect.path, json=body, headers=key)
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    if dialect.name == "generate":  # its times are those of each request
        assert [dialect.piece(event) for event in payloads(again.content)] == [
            dialect.piece(event) for event in payloads(first.content)
        ]
    else:
        contents = [CREATED.sub(b"", response.content) for response in (first, again)]
        assert contents[0] == contents[1]
    assert len(service.worker.seen) == 1
    elsewhere = DIALECTS["completions" if dialect.name == "generate" else "generate"]
    for other in (
        dialect.body("other", stream=streamed),
        dialect.body(PROMPT, stream=not streamed),
        dialect.body(PROMPT, stream=streamed, max_tokens=5),
    ):
        refused = client.post(dialect.path, json=other, headers=key)
        error = dialect.error(refused, 400)
        assert (error.code, error.param) == ("idempotency_key_reuse", "Idempotency-Key")
        assert refused.headers["x-should-retry"] == "false"
    refused = client.post(elsewhere.path, json=elsewhere.body(PROMPT), headers=key)
    assert elsewhere.error(refused, 400).code == "idempotency_key_reuse"


# --- refusals ---


@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
def test_an_unknown_model_and_a_prompt_that_is_too_long_are_refused(
    client: httpx.Client, service: RunningService, dialect: Dialect, streamed: bool
) -> None:
    error = dialect.error(dialect.post(client, model="nobody", stream=streamed), 404)
    assert (error.code, error.param) == ("model_not_found", "model")
    error = dialect.error(dialect.post(client, "abc " * 3000, stream=streamed), 400)
    assert (error.code, error.param) == ("context_length_exceeded", dialect.prompt_member)
    if dialect.name == "messages":
        counted = {"model": "nobody", "messages": dialect.body()["messages"]}
        refused = client.post(f"{dialect.path}/count_tokens", json=counted)
        assert dialect.error(refused, 404).code == "model_not_found"
    assert service.worker.seen == [], "nothing was queued"


@pytest.mark.promise(
    "Clients: its errors have Anthropic's shape, also those of the HTTP layer (except for bytes "
    "that are not HTTP)"
)
@every_dialect
@table(
    ("method", "headers", "content", "status", "code"),
    [
        *(
            ("POST", JSON, content, 400, "invalid_json")
            for content in (b"", b"{", b"[]", b"7", b'"x"', b"null", b'{"model": NaN}', b"\xff\xfe")
        ),
        ("POST", JSON, b"{}x", 400, "invalid_json"),
        ("GET", {}, b"", 405, "method_not_allowed"),
        ("PUT", JSON, b"{}", 405, "method_not_allowed"),
        *(
            ("POST", {"content-type": kind}, b"{}", 415, "unsupported_media_type")
            for kind in ("text/csv", "application/a/b+json", "application/json,application/json")
        ),
        ("POST", {**JSON, "content-encoding": "br"}, b"{}", 415, "unsupported_content_encoding"),
        ("POST", JSON, b" " * 5_000_000, 413, "request_too_large"),
        ("POST", JSON, [b" " * 100_000] * 50, 413, "request_too_large"),  # chunked
        ("POST", {**JSON, "origin": "https://x.test"}, b"{}", 403, "origin_not_allowed"),
        ("POST", {**JSON, "host": "evil.example"}, b"{}", 421, "host_not_allowed"),
    ],
)
def test_a_refusal_of_http_is_an_error_of_the_dialect(
    client: httpx.Client,
    dialect: Dialect,
    method: str,
    headers: dict[str, str],
    content: bytes | list[bytes],
    status: int,
    code: str,
) -> None:
    paths = [dialect.path, *(dialect.path + end for end in ENDS.get(dialect.name, ()))]
    for path in paths:
        refused = client.request(method, path, headers=headers, content=content)
        assert dialect.error(refused, status).code == code
        assert refused.headers.get("allow") == ("POST" if status == 405 else None)
    assert client.get("/health").status_code == 200


@every_dialect
def test_a_browser_reads_an_internal_error_which_has_no_secrets(
    client: httpx.Client,
    service: RunningService,
    dialect: Dialect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.app.state.services.catalog, "require", broken)
    response = client.post(dialect.path, json=dialect.body(), headers={"origin": ORIGIN})
    assert dialect.error(response, 500, "server_error").code == "internal_error"
    assert "secret" not in response.text
    assert response.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.promise(
    "Clients: its errors have Anthropic's shape, also those of the HTTP layer (except for bytes "
    "that are not HTTP)"
)
@pytest.mark.parametrize(
    ("limits", "status", "kind", "code"),
    [
        (
            {"max_queued_jobs": 1, "max_queue_share_per_tenant": 1},
            *(503, "overloaded_error", "server_overloaded"),
        ),
        (
            {"max_queued_jobs": 2, "max_queued_jobs_per_tenant": 1},
            *(429, "rate_limit_error", "tenant_queue_full"),
        ),
        (None, 503, "service_unavailable", "service_unavailable"),
    ],
    ids=["full", "full for a tenant", "no worker"],
)
def test_a_request_that_cannot_be_queued_is_to_be_sent_again_later(
    redis_url: str,
    checkpoint: Path,
    limits: dict[str, Any] | None,
    status: int,
    kind: str,
    code: str,
) -> None:
    with ExitStack() as stack:
        if limits is None:
            service = stack.enter_context(running_frontend(redis_url, new_namespace()))
        else:
            made = running_service(redis_url, new_namespace(), checkpoint, **limits)
            service = stack.enter_context(made)
            service.park()
        client = stack.enter_context(httpx.Client(base_url=service.base_url, timeout=60))
        if limits is not None:
            queued = client.stream("POST", "/generate", json={"prompt": "a"})
            assert stack.enter_context(queued).status_code == 200
        for dialect in DIALECTS.values():
            for streamed in (False, True):
                refused = dialect.post(client, stream=streamed)
                assert dialect.error(refused, status, kind).code == code
                assert int(refused.headers["retry-after"]) >= 1
