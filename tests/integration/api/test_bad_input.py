"""Whatever is sent: an answer, never a 5xx, and the service goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.api.stage import MODEL, Stage
from tests.integration.api.stage_fixtures import (  # noqa: F401
    checkpoint,
    redis_url,
    shared_stage,
    stage,
)

ROUTES = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"]
MEMBERS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "seed",
    "stream", "stream_options", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "rep_penalty", "min_tokens", "ignore_eos", "return_token_ids", "on_disconnect", "n", "tools",
    "response_format", "tokens", "chat_template_kwargs", "add_special_tokens", "user", "metadata",
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
GOOD = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": MODEL, "prompt": "a"},
    "/generate": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
FUZZED = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def client(stage: Stage) -> Iterator[httpx.Client]:  # noqa: F811
    stage.script.tokens_per_step = 64
    with httpx.Client(base_url=stage.base_url, timeout=30) as made:
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
def test_random_members_are_answered(
    client: httpx.Client, path: str, members: dict[str, Any]
) -> None:
    body = json.dumps({**GOOD[path], **members})  # NaN and lone surrogates included
    assert_answered(client.post(path, content=body))


@given(path=st.sampled_from(ROUTES), body=st.binary(max_size=60))
@FUZZED
def test_random_bytes_are_answered(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert_answered(answer)
    assert answer.status_code == 400


@given(data=st.data())
@FUZZED
def test_damaged_bodies_are_answered(client: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(ROUTES))
    body = bytearray(json.dumps(GOOD[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert_answered(client.post(path, content=bytes(body)))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
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
        b'\xef\xbb\xbf{"prompt":"a"}',
        b'{"prompt":"a","prompt":7}',
        b'{"messages":[{"role":"user","content":"' + b"a" * 200_000 + b'"}]}',
    ],
)
def test_hostile_bodies_are_refused(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert_answered(answer)
    assert answer.status_code == 400 or b"aaaa" in body


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
