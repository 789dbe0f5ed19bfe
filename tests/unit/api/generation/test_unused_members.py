"""What changes nothing is accepted, and listed or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from api.batches.row import make_endpoints
from api.dialects.chat.protocol import ChatRequest
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.embeddings.protocol import EmbeddingRequest
from api.dialects.messages.protocol import MessageRequest
from api.dialects.responses.protocol import ResponseRequest, check_request
from api.dialects.responses.request import chat_input
from api.generation.ignored_parameters import LIST, UNUSED_MEMBERS, IgnoredMembers
from api.generation.protocol import RequestModel, ResponseFormatText
from api.generation.validation import parse_request
from shared.messages import InvalidParameter

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER], "stream": True},
    "completion": {"model": "m", "prompt": "hi", "stream": True},
    "embedding": {"model": "m", "input": "hi"},
    "response": {"model": "m", "input": "hi", "stream": True},
    "message": {"model": "m", "messages": [USER], "max_tokens": 5, "stream": True},
}
SCHEMAS: dict[str, type[RequestModel]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "embedding": EmbeddingRequest,
    "response": ResponseRequest,
    "message": MessageRequest,
}
# A value for each row whose values are said in words.
SAMPLES: dict[str, Any] = {
    "a string": "me",
    "an object of strings": {"a": "b"},
    "a number": 3,
    "an object of `mode`, `ttl`": {"mode": "implicit"},
    "an object": {"a": "b"},
    "a list": [{"a": "b"}],
    "`{edits}`": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "`{}`, `{edits: []}`": {"edits": []},
    "`[]`": [],
    '`["text"]`': ["text"],
}
# What an object needs beside the member.
BESIDE: dict[str, dict[str, Any]] = {"thinking": {"type": "adaptive"}, "output_config": {}}
WORDS = {"`true`": True, "`false`": False, "`1.0`": 1.0, "`1`": 1, "``": ""}

CASES = [
    pytest.param(dialect, row, id=f"{dialect}-{row.path}-{row.values.text[:20]}")
    for row in UNUSED_MEMBERS
    for dialect in row.dialects
]


def samples(text: str) -> list[Any]:
    if text in SAMPLES:
        return [SAMPLES[text]]
    return [WORDS.get(word, word.strip("`")) for word in text.split(", ")]


def having(dialect: str, path: str, value: Any) -> dict[str, Any]:
    """A request with that value at the path."""
    body = copy.deepcopy(BODIES[dialect])
    first, _, inner = path.removesuffix(LIST).partition(".")
    if inner:
        body[first] = {**BESIDE.get(first, {}), inner: value}
    else:
        body[first] = [value] if path.endswith(LIST) else value
    return body


def parsed(dialect: str, body: dict[str, Any], ignored: IgnoredMembers) -> RequestModel:
    request = parse_request(body, SCHEMAS[dialect], ignored)
    if isinstance(request, ResponseRequest):
        check_request(request)
        chat_input(request, [], "job")
    return request


@pytest.mark.promise(
    "Clients: parameters without effect are accepted and reported, or refused if a setting asks "
    "for it; other values are a 400 that names the parameter"
)
@pytest.mark.parametrize(("dialect", "row"), CASES)
def test_each_value_of_the_list_changes_nothing(dialect: str, row: Any) -> None:
    first = row.path.partition(".")[0]
    beside = {first: BESIDE[first]} if first in BESIDE else {}
    plain = parsed(dialect, {**BODIES[dialect], **beside}, IgnoredMembers())
    for value in samples(row.values.text):
        body = having(dialect, row.path, value)
        before = copy.deepcopy(body)
        ignored = IgnoredMembers()
        request = parsed(dialect, body, ignored)
        assert body == before
        if "stream_options" in body:
            request = request.model_copy(update={"stream_options": None})
        assert request == plain
        assert ignored.names == ([row.path.removesuffix(LIST)] if row.is_reported else [])


@pytest.mark.parametrize(("dialect", "row"), CASES)
def test_what_is_ignored_can_be_refused_by_name(dialect: str, row: Any) -> None:
    for value in samples(row.values.text):
        body = having(dialect, row.path, value)
        if not row.is_reported:
            parsed(dialect, body, IgnoredMembers(refuse=True))
            continue
        with pytest.raises(InvalidParameter) as refused:
            parsed(dialect, body, IgnoredMembers(refuse=True))
        assert refused.value.param == row.path.replace(LIST, ".0")
        assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize(("dialect", "row"), CASES)
def test_every_other_value_is_a_400_by_name(dialect: str, row: Any) -> None:
    """A value that is in no row: it might ask for something."""
    rows = [other for other in UNUSED_MEMBERS if other.path == row.path]
    is_open = any(dialect in other.dialects and other.values.have({"other": 7}) for other in rows)
    body = having(dialect, row.path, 7.5 if is_open else {"other": 7})
    with pytest.raises(InvalidParameter) as refused:
        parsed(dialect, body, IgnoredMembers())
    path = row.path.replace(LIST, ".0")
    assert refused.value.param in (path, f"{path}.other")


def test_members_are_named_once_in_the_order_of_the_body() -> None:
    body = {
        **BODIES["response"],
        "include": ["reasoning.encrypted_content", "web_search_call.results"] * 100,
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    ignored = IgnoredMembers()
    request = parsed("response", body, ignored)
    assert ignored.names == ["include", "text.verbosity", "truncation", "reasoning.summary"]
    assert isinstance(request, ResponseRequest)
    assert (request.include, request.text.format) == ([], ResponseFormatText(type="text"))
    assert (request.reasoning.effort, request.reasoning.summary) == ("low", None)


@pytest.mark.parametrize(
    ("dialect", "members", "param"),
    [
        ("chat", {"store": 1}, "store"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"skip_special_tokens": False}, "skip_special_tokens"),
        ("chat", {"functions": [{}]}, "functions"),
        ("chat", {"web_search_options": {}}, "web_search_options"),
        ("chat", {"metadata": {"a": 1}}, "metadata"),
        ("response", {"truncation": True}, "truncation"),
        ("response", {"include": ["web_search", "x"]}, "include.0"),
        ("response", {"context_management": [{"type": "compaction"}]}, "context_management"),
        ("response", {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ("response", {"max_tool_calls": True}, "max_tool_calls"),
        ("response", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
        ("message", {"context_management": {"edits": [{"keep": "all"}]}}, "context_management"),
        ("message", {"compaction": {"type": "summarize"}}, "compaction"),
        ("message", {"speed": "slow"}, "speed"),
    ],
)
def test_what_might_change_the_answer_stays_refused(
    dialect: str, members: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        parsed(dialect, {**BODIES[dialect], **members}, IgnoredMembers())
    assert refused.value.param == param


def test_a_row_of_a_batch_is_read_as_its_route_reads_it() -> None:
    part: Any = None  # only `prepare` uses it
    endpoint = make_endpoints(part, part)["/v1/chat/completions"]
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "user": "me"}'
    assert endpoint.parse(body, IgnoredMembers()).model == "m"
    with pytest.raises(InvalidParameter, match="user"):
        endpoint.parse(body, IgnoredMembers(refuse=True))
