"""Bodies become requests, or errors that name the member at fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_sampling
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.completions.request import completion_sampling
from api.dialects.generate.protocol import GenerateRequest
from api.dialects.generate.request import generate_sampling
from api.generation import validation_errors
from api.generation.ignored_parameters import IgnoredMembers, request_ignored
from api.generation.messages import template_messages
from api.generation.protocol import MAX_ENTRIES
from api.generation.sampling import ContextBudget
from api.generation.validation import parse_json, parse_request
from api.request_errors import ClientError, invalid_parameter, unsupported
from shared.messages import InvalidParameter, OnDisconnect

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n"}}
ROOM = ContextBudget(context_tokens=100, vocab_size=50, prompt_tokens=10)


def chat(**members: Any) -> ChatRequest:
    return parse_request({**CHAT, **members}, ChatRequest)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    refusal = None
    try:
        assert isinstance(parse_json(raw), dict)
    except ClientError as error:
        refusal = (error.status, error.code)
    assert refusal in (None, (400, "invalid_json"))


@pytest.mark.parametrize(
    ("members", "param", "code"),
    [
        ({"temperature": "x"}, "temperature", None),
        ({"messages": [1]}, "messages.0", None),
        ({"logit_bias": {"5": "x"}}, "logit_bias", None),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "unsupported_parameter"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": None, "n": [{}]}, "n", None),
        ({"x" * 500: 1}, "x" * 200, "unsupported_parameter"),
        ({"temperature": 10**400}, "temperature", None),
    ],
)
def test_errors_name_the_member(members: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(**members)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (["x"] * 65, "at most 64 prompts, got 65"),
        ([[1]] * 65, "at most 64 prompts, got 65"),
        ([1, *[[1]] * 65], "must be text, token ids, or a list of one of these"),
    ],
)
@pytest.mark.parametrize("model", [CompletionRequest, GenerateRequest])
def test_too_many_prompts_are_refused_before_each_is_validated(
    model: type[CompletionRequest | GenerateRequest], prompt: list[Any], reason: str
) -> None:
    """The fault of the last one is not found."""
    with pytest.raises(InvalidParameter) as caught:
        parse_request({"model": "m", "prompt": [*prompt[:-1], {}]}, model)
    assert (caught.value.param, caught.value.message) == ("prompt", reason)


@pytest.mark.parametrize("prompt", [["x"] * 64, [[1]] * 64, [1] * 1000, "x" * 1000])
def test_as_many_prompts_as_are_allowed_are_read(prompt: Any) -> None:
    assert parse_request({"model": "m", "prompt": prompt}, CompletionRequest).prompt == prompt


def test_of_very_many_unknown_parameters_few_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = validation_errors.invalid

    def counted(error: ValidationError, body: dict[str, Any]) -> InvalidParameter:
        described.append(error.error_count())
        return describe(error, body)

    monkeypatch.setattr(validation_errors, "invalid", counted)
    options = {f"x{number}": number for number in range(50_000)}
    with pytest.raises(InvalidParameter) as caught:
        chat(stream_options=options, stream=True)
    assert caught.value.param == "stream_options.x0"
    assert described == [MAX_ENTRIES + 1]


def test_of_several_faults_the_first_in_a_documented_order_is_named() -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"zebra": 1}, "zebra"),
        ({"audio": {}}, "audio"),
        ({"temperature": "x"}, "temperature"),  # a base's parameters come before `messages`
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
            "tools.0.function.x",
        ),
        ({"model": None}, "model"),
    ]
    for first in range(len(faults)):
        members = {name: value for fault, _ in faults[first:] for name, value in fault.items()}
        with pytest.raises(InvalidParameter) as caught:
            chat(**members)
        assert caught.value.param == faults[first][1]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{**TOOL, "x": 1}]}, "tools.0.x"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tool_choice": {**TOOL, "x": 1}}, "tool_choice.x"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"response_format": FORMAT | {"x": 1}}, "response_format.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "x": 1}}},
            "response_format.json_schema.x",
        ),
    ],
)
def test_a_name_that_is_a_type_and_a_parameter_is_found_in_paths(
    members: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(**members)
    assert caught.value.param == param


def test_null_is_the_same_as_absent() -> None:
    assert chat(temperature=None, stop=None, n=None, nonsense=None) == chat()


def test_defaults_are_openais() -> None:
    sampling = chat_sampling(chat(), ROOM)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 90)
    assert chat().on_disconnect is OnDisconnect.CANCEL
    completion = parse_request({"model": "m", "prompt": "a"}, CompletionRequest)
    assert completion_sampling(completion, ROOM).max_tokens == 16
    native = generate_sampling(parse_request({"prompt": "a"}, GenerateRequest), ROOM)
    assert (native.max_tokens, native.temperature, native.repetition_penalty) == (64, 0.0, 1.0)


def test_max_tokens_is_clipped_to_the_room_and_reported() -> None:
    tight = ContextBudget(context_tokens=12, vocab_size=50, prompt_tokens=10)
    completion = parse_request({"model": "m", "prompt": "a"}, CompletionRequest)
    assert completion_sampling(completion, tight).max_tokens == 2
    assert chat_sampling(chat(max_tokens=3), tight).max_tokens == 2
    completion = parse_request({"model": "m", "prompt": "a", "max_tokens": 3}, CompletionRequest)
    assert completion_sampling(completion, tight).max_tokens == 2
    for refuse in (False, True):
        ignored = IgnoredMembers(refuse=refuse)
        token = request_ignored.set(ignored)
        tight.report_clipped("max_tokens", 2)
        tight.report_clipped("max_tokens", None)
        assert ignored.names == []
        if refuse:
            with pytest.raises(InvalidParameter) as caught:
                tight.report_clipped("max_tokens", 3)
            assert caught.value.code == "context_length_exceeded"
            assert "13 were requested (10 in the prompt, 3 for the answer)" in caught.value.message
        else:
            tight.report_clipped("max_tokens", 3)
            assert ignored.text == "max_tokens"
        request_ignored.reset(token)
    with pytest.raises(InvalidParameter) as caught:
        ContextBudget(12, 50, 12).check_prompt("messages")
    assert caught.value.code == "context_length_exceeded"


def test_members_become_sampling_params() -> None:
    sampling = chat_sampling(
        chat(
            max_tokens=5,
            max_completion_tokens=7,
            stop="x",
            top_k=-1,
            logit_bias={"3": -100, "4": 0.5},
            seed=-5,
            logprobs=True,
            top_logprobs=3,
            stop_token_ids=[1, 2],
            min_tokens=2,
            repetition_penalty=1.1,
        ),
        ROOM,
    )
    assert sampling.max_tokens == 7
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (1, 2))
    assert (sampling.top_k, sampling.seed, sampling.logprobs) == (0, -5, 3)
    assert sampling.logit_bias == {3: -100.0, 4: 0.5}


def test_a_seed_is_always_resolved() -> None:
    seeds = {chat_sampling(chat(), ROOM).seed for _ in range(3)}
    assert None not in seeds
    assert len(seeds) == 3


def test_renamed_members_are_named_as_the_caller_knows_them() -> None:
    native = parse_request({"prompt": "a", "rep_penalty": 0}, GenerateRequest)
    with pytest.raises(InvalidParameter) as caught:
        generate_sampling(native, ROOM)
    assert caught.value.param == "rep_penalty"


def test_messages_keep_what_templates_know() -> None:
    sdk_dump = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        sdk_dump,
        {"role": "user", "content": parts, "name": "n"},
    ]
    assert template_messages(chat(messages=messages).messages) == [
        {"role": "system", "content": "d"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": parts, "name": "n"},
    ]


def test_error_objects_say_what_to_do() -> None:
    error = invalid_parameter(InvalidParameter("top_p", "must be between 0 and 1, got 2"))
    assert error.message == "Invalid value for 'top_p': must be between 0 and 1, got 2."
    refused = invalid_parameter(unsupported("n", "one choice per request for now"))
    assert refused.message == "Unsupported parameter: 'n': one choice per request for now."
    assert refused.code == "unsupported_parameter"


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":"x\\ud800"}', "surrogate"),
        (b'{"a":"\\ud83d","b":1}', "surrogate"),
        (b'\xef\xbb\xbf["\\udbff"]', "surrogate"),
        (b'{"a":"x', "truncated"),
    ],
)
def test_half_a_surrogate_pair_is_named_wherever_it_is(raw: bytes, reason: str) -> None:
    with pytest.raises(ClientError) as refused:
        parse_json(raw)
    assert (refused.value.code, reason in refused.value.message) == ("invalid_json", True)


def test_marks_of_other_programs_in_messages_are_left_out() -> None:
    mark = {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": None}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "d"}]},
    ]
    marked = [{**message, **mark} for message in plain]
    for message in (marked[0], marked[3]):
        message["content"] = [{**part, **mark} for part in message["content"]]
    function = {**call["function"], **mark}  # type: ignore[dict-item]
    marked[2]["tool_calls"] = [{**call, **mark, "function": function}]
    read = [
        template_messages(parse_request({"model": "m", "messages": one}, ChatRequest).messages)
        for one in (plain, marked)
    ]
    assert read[0] == read[1]
