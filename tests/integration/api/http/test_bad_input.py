"""Whatever is sent: an answer, never a 5xx, and the service goes on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api_document import json_routes
from tests.support.asgi_client import asgi_client
from tests.support.running_service import MODEL, RunningService
from tests.support.table import table

ROUTES = json_routes()
MEMBERS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "seed",
    "stream", "stream_options", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "rep_penalty", "min_tokens", "ignore_eos", "return_token_ids", "on_disconnect", "n", "tools",
    "response_format", "tokens", "chat_template_kwargs", "add_special_tokens", "user", "metadata",
    "system", "tool_choice", "thinking", "stop_sequences", "input", "instructions", "text", "store",
    "previous_response_id", "background", "reasoning", "output_config", "service_tier",
    "queue_timeout",
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 600)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "cancel", "\x00", "\ud800", 10**40, 1e308, ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1"]), inner)
    ),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "a"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/responses": {"model": MODEL, "input": "a"},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": "a"},
    "/generate": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
JSON = {"content-type": "application/json"}
FUZZED = settings(
    max_examples=200,
    derandomize=True,  # every run is the same run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    service.script.tokens_per_step = 64
    with httpx.Client(base_url=service.base_url, timeout=30) as made:
        yield made


@pytest.fixture
def app(service: RunningService) -> Iterator[httpx.Client]:
    """The app without its HTTP server: no body is anything else to that than bytes."""
    service.script.tokens_per_step = 64
    with asgi_client(service.app, service.loop) as made:
        yield made


def assert_answered(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@given(
    path=st.sampled_from(ROUTES),
    members=st.dictionaries(st.sampled_from(MEMBERS) | st.text(max_size=5), VALUES, max_size=4),
)
@FUZZED
def test_random_members_are_answered(app: httpx.Client, path: str, members: dict[str, Any]) -> None:
    body = json.dumps({**GOOD.get(path, {}), **members})  # NaN and lone surrogates included
    assert_answered(app.post(path, content=body, headers=JSON))


@given(path=st.sampled_from(ROUTES), body=st.binary(max_size=60))
@FUZZED
def test_random_bytes_are_answered(app: httpx.Client, path: str, body: bytes) -> None:
    answer = app.post(path, content=body, headers=JSON)
    assert_answered(answer)
    assert answer.status_code == 400


@given(data=st.data())
@FUZZED
def test_damaged_bodies_are_answered(app: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(ROUTES))
    body = bytearray(json.dumps(GOOD.get(path, {})).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert_answered(app.post(path, content=bytes(body), headers=JSON))


@table(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt":' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"max_tokens":' + b"9" * 5000 + b"}",
        b'{"max_tokens":1e999}',
        b'{"temperature":-Infinity}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\udc00x"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"a","prompt":7}',
        b'{"messages":[{"role":"user","content":"' + b"a" * 200_000 + b'"}]}',
        b'{"model":"\x00"}',
        b'{"model":"a\nb"}',
        b'{"model":NaN}',
        b'{"temperature":Infinity}',
        b'{"max_tokens":1E400}',
        b'{"max_tokens":-0.0}',
        b'{"max_tokens":0x10}',
        b'{"max_tokens":01}',
        b'{"max_tokens":1,}',
        b"{'model':'x'}",
        b'{"model":"x" /* why */}',
        b'{"":"", "":""}',
        b'{"__proto__":{"x":1},"constructor":1}',
        b'{"model":"\\ud83d"}',
        b'{"model":"\\ude00\\ud83d"}',
        b'{"model":"\\u0000"}',
        b'{"model":"' + b"m" * 100_000 + b'"}',
        b'{"' + b"n" * 100_000 + b'":1}',
        b"{" + b",".join(b'"m%d":1' % number for number in range(20_000)) + b"}",
        b'{"stop":' + b"[" + b'"x",' * 20_000 + b'"x"]}',
        b'{"messages":[' + b'{"role":"user","content":"x"},' * 11_000 + b"{}]}",
        b'{"logit_bias":{"1":1e308}}',
        b'{"seed":-9223372036854775809}',
        '{"model":"x"}'.encode("utf-16"),
        '{"model":"x"}'.encode("utf-32"),
        gzip.compress(b'{"model":"x"}', mtime=0),
        b'{"model":"x"}{"model":"x"}',
        b'{"model":"x"}\x00',
        b"\x00" * 100,
        b" " * 100_000,
    ],
)
def test_hostile_bodies_are_refused(app: httpx.Client, body: bytes) -> None:
    for path in ROUTES:
        answer = app.post(path, content=body, headers=JSON)
        assert_answered(answer)
        assert answer.status_code == 400 or b"aaaa" in body, path


@pytest.mark.parametrize("path", ROUTES)
def test_a_compressed_body_is_decoded_or_refused_by_the_name_of_its_coding(
    app: httpx.Client, path: str
) -> None:
    body = json.dumps(GOOD.get(path, {})).encode()
    for coding, content in (
        ("br", body),
        ("deflate", body),
        ("identity, gzip", body),
        ("x" * 5000, body),
    ):
        headers = {**JSON, "content-encoding": coding}
        answer = app.post(path, content=content, headers=headers)
        assert_answered(answer)
        assert answer.status_code == 415
        assert coding[:20] in answer.json()["error"]["message"]
    for coding, content in (
        ("Identity", body),
        ("gzip", gzip.compress(body)),
        ("zstd", zstandard.ZstdCompressor().compress(body)),
    ):
        answer = app.post(path, content=content, headers={**JSON, "content-encoding": coding})
        assert answer.is_success == (path in GOOD), coding
    for coding in ("gzip", "zstd"):
        answer = app.post(path, content=body, headers={**JSON, "content-encoding": coding})
        assert answer.status_code == 400
        assert f"not valid {coding}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["origin", "sec-fetch-site"])
def test_a_form_of_a_page_is_refused(app: httpx.Client, name: str) -> None:
    """Curl's default content type is read as JSON only where no browser sent it."""
    value = {"origin": "http://localhost:3000", "sec-fetch-site": "none"}[name]
    for path in ROUTES:
        body = json.dumps(GOOD.get(path, {})).encode()
        headers = {"content-type": "application/x-www-form-urlencoded", name: value}
        answer = app.post(path, content=body, headers=headers)
        assert answer.status_code == 415, path


@pytest.mark.parametrize(
    ("kind", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON ; charset=utf-16", True),
        ("application/vnd.acme+json", True),
        (None, False),
        ("", False),
        ("text/plain", False),
        ("text/json", False),
        ("text/plain; application/json", False),
        ("application/x-www-form-urlencoded", True),  # curl's default; see below
        ("application/jsonp", False),
        ("application/octet-stream", False),
        ("multipart/form-data", False),
        ("é", False),
        ("x" * 5000, False),
    ],
)
def test_a_body_that_is_not_called_json_is_refused(
    app: httpx.Client, kind: str | None, is_json: bool
) -> None:
    """A browser sends the others to any server, without asking it first."""
    for path in ROUTES:
        body = json.dumps(GOOD.get(path, {})).encode()
        headers = {} if kind is None else {"content-type": kind.encode()}
        answer = app.post(path, content=body, headers=headers)
        assert_answered(answer)
        assert answer.is_success == (is_json and path in GOOD), path
        assert (answer.status_code == 415) is not is_json, path
        assert is_json or "application/json" in answer.json()["error"]["message"]


@table(
    "name",
    [
        "accept", "accept-encoding", "authorization", "x-api-key", "anthropic-version",
        "anthropic-beta", "cookie", "forwarded", "host", "idempotency-key", "last-event-id",
        "openai-organization", "origin", "range", "te", "traceparent", "x-client-request-id",
        "x-forwarded-for", "x-request-id", "x-stainless-retry-count", "if-none-match",
    ],
)  # fmt: skip
def test_headers_with_nonsense_are_answered(client: httpx.Client, name: str) -> None:
    for value in (
        b"",
        b"\xff\xfe",
        b"\xf0\x9f\x98\x80",
        b"a" * 20_000,
        b"a\tb",
        b'"',
        b"-1",
        b"*/*;q=x",
    ):
        headers: dict[bytes, bytes] = {name.encode(): value}
        for path, body in GOOD.items():
            assert_answered(client.post(path, json=body, headers=headers))
        assert_answered(client.get("/v1/models", headers=headers))
        assert_answered(client.get("/v1/jobs/0-none/stream", headers=headers))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%ff%fe", "/v1/models/" + "a/" * 500, "/v1/jobs?limit=%00", "/%00",
        "/v1/jobs/%F0%9F%98%80/stream", "/health?x=%ff", "/v1/jobs?state=%ff&state=queued",
        "/../../etc/passwd", "/static/..%2f..%2fmain.py",
    ],
)  # fmt: skip
def test_hostile_paths_are_answered(client: httpx.Client, path: str) -> None:
    assert_answered(client.get(path))


def test_chat_templates_cannot_be_broken_out_of(client: httpx.Client) -> None:
    for kwargs in (
        {"enable_thinking": False},
        {"messages": 1},
        {"__class__": 1},
        {"raise_exception": "x"},
        {"a" * 1000: {"b": ["c"]}},
        {"range": 10**9},
        {"namespace": None, "message": "{{ 1 }}"},
    ):
        body = {**GOOD["/v1/chat/completions"], "max_tokens": 4, "chat_template_kwargs": kwargs}
        assert_answered(client.post("/v1/chat/completions", json=body))
