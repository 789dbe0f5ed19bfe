"""The Messages dialect as pure data: requests in, blocks, events, errors and pages out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter, ValidationError

from api.dialects.messages.formatter import (
    BlockStream,
    MessageContext,
    MessageFormatter,
    WholeBlocks,
)
from api.dialects.messages.protocol import MessageRequest
from api.dialects.messages.request import (
    PARAM_NAMES,
    chat_input,
    is_cut_by_context,
    message_sampling,
)
from api.errors import ApiError, ServerError
from api.generation.sampling import ContextBudget, renamed_parameters
from api.generation.validation import parse_request
from api.http.json_response import anthropic_body, anthropic_status
from api.output_parsers.events import OutputEvent, Reasoning, Text, ToolArguments, ToolCall
from api.system.models import model_page
from shared.messages import Cursor, Delta, Finished, FinishReason, InvalidParameter, Usage

CONTEXT = MessageContext(id="msg_1", model="m", prompt_tokens=5)
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
ROOM = ContextBudget(context_tokens=100, vocab_size=50, prompt_tokens=40)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL = {"name": "depth", "input_schema": {"type": "object"}}


def parsed(**members: Any) -> MessageRequest:
    base = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return parse_request({**base, **members}, MessageRequest)


class ScriptedParser:
    """Says the given events in place of each character of the text."""

    has_calls = False
    reasoning_bytes = 0
    spans = None

    def __init__(
        self, reply: Sequence[Sequence[OutputEvent]], rest: Sequence[OutputEvent] = ()
    ) -> None:
        self._said = list(reply)
        self._rest = rest

    def push(self, text: str) -> Sequence[OutputEvent]:
        events = [event for _ in text for event in self._said.pop(0)]
        self.has_calls |= any(isinstance(event, ToolCall) for event in events)
        return events

    def finish(self) -> Sequence[OutputEvent]:
        return self._rest


def deltas(text: str) -> list[Delta]:
    return [Delta(Cursor(i, i), Cursor(i + 1, i + 1), (i,), text[i]) for i in range(len(text))]


def finished(reason: FinishReason = FinishReason.STOP, stop: str | int | None = None) -> Finished:
    return Finished(Cursor(3, 3), reason, USAGE, stop)


# --- requests ---


def test_text_is_short_for_one_block_and_system_comes_first() -> None:
    ask = chat_input(
        parsed(
            system=[
                {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ],
            messages=[
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
                {"role": "user", "content": [{"type": "text", "text": "three"}]},
            ],
        )
    )
    assert ask.messages == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    ask = chat_input(
        parsed(
            messages=[
                {"role": "user", "content": "one"},
                {"role": "user", "content": [{"type": "text", "text": "two"}]},
                {"role": "assistant", "content": "three"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "depth", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            ]
        )
    )
    user, assistant, tool = ask.messages
    assert [part["text"] for part in user["content"]] == ["one", "two"]
    assert [part["text"] for part in assistant["content"]] == ["three"]
    assert assistant["tool_calls"][0]["id"] == "c"
    assert tool == {"role": "tool", "tool_call_id": "c", "name": "depth", "content": ""}


def test_calls_results_and_thoughts_go_where_templates_look_for_them() -> None:
    ask = chat_input(
        parsed(
            messages=[
                {"role": "user", "content": "How deep?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I must look.", "signature": ""},
                        {"type": "text", "text": "Let me see."},
                        {
                            "type": "tool_use",
                            "id": "a",
                            "name": "depth",
                            "input": {"gate": 1, "in": "é"},
                        },
                        {"type": "tool_use", "id": "b", "name": "flow", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "7 m"}],
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "b",
                            "content": "no such gate",
                            "is_error": True,
                        },
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ]
        )
    )
    _, assistant, first, second, user = ask.messages
    assert assistant["reasoning_content"] == "I must look."
    assert assistant["content"] == [{"type": "text", "text": "Let me see."}]
    calls = assistant["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["depth", "flow"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"gate": 1, "in": "é"}
    assert (first["tool_call_id"], first["name"]) == ("a", "depth")
    assert first["content"] == [{"type": "text", "text": "7 m"}]
    assert second["content"] == "Error: no such gate"
    assert user == {"role": "user", "content": [{"type": "text", "text": "And now?"}]}


def test_tools_and_their_choice_are_those_of_the_other_dialect() -> None:
    tools = [
        {**TOOL, "description": "How deep.", "strict": True, "type": "custom"},
        {**TOOL, "name": "flow"},
    ]
    use = chat_input(parsed(tools=tools, tool_choice={"type": "any"})).tool_use
    function = {"name": "depth", "description": "How deep.", "parameters": {"type": "object"}}
    assert use.tools[0].definition() == {"type": "function", "function": function}
    assert [tool.strict for tool in use.tools] == [True, False]
    choices: list[tuple[dict[str, Any] | None, int, bool, bool]] = [
        (None, 2, False, True),
        ({"type": "any"}, 2, True, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, 2, False, False),
        ({"type": "none"}, 0, False, True),
        ({"type": "tool", "name": "flow", "disable_parallel_tool_use": True}, 1, True, False),
    ]
    for choice, num_callable, must_call, parallel in choices:
        use = chat_input(parsed(tools=tools, tool_choice=choice)).tool_use
        assert (len(use.callable), use.must_call, use.parallel) == (
            num_callable,
            must_call,
            parallel,
        )


@pytest.mark.parametrize(
    ("choice", "may_repeat"),
    [
        ({"type": "tool", "name": "depth"}, False),
        ({"type": "tool", "name": "depth", "disable_parallel_tool_use": False}, False),
        ({"type": "any"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, False),
    ],
)
def test_a_named_tool_is_called_once_and_any_tool_at_least_once(
    choice: dict[str, Any], may_repeat: bool
) -> None:
    use = chat_input(parsed(tools=[TOOL], tool_choice=choice)).tool_use
    assert (use.must_call, use.parallel) == (True, may_repeat)


def test_thinking_and_output_format_are_mapped() -> None:
    assert chat_input(parsed()).chat_template_kwargs == {}
    for kind, expected in (("adaptive", True), ("disabled", False)):
        ask = chat_input(parsed(thinking={"type": kind}))
        assert ask.chat_template_kwargs == {"enable_thinking": expected}
    schema = {"type": "object", "properties": {}}
    ask = chat_input(parsed(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert ask.output is not None
    assert ask.output.param == "output_config.format.schema"
    assert '"object"' in ask.output.grammar.text
    for effort, expected in (("low", "low"), ("max", "max")):
        assert chat_input(parsed(output_config={"effort": effort})).reasoning_effort == expected


def test_members_that_ask_for_what_happens_anyway_are_accepted() -> None:
    marked = {"type": "ephemeral", "ttl": "1h"}
    parsed(
        cache_control=marked,
        system="s",
        metadata={"user_id": "u"},
        service_tier="standard_only",
        speed="standard",
        tools=[{**TOOL, "cache_control": marked, "defer_loading": False, "input_examples": None}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": marked, "citations": None}
                ],
            }
        ],
        stop_sequences=None,
        temperature=None,
    )


def calling(num_calls: int) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "name": "f", "input": {}}
    calls = [{**call, "id": str(index)} for index in range(num_calls)]
    return [{"role": "assistant", "content": calls}, *user({"type": "text", "text": "a"})]


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": user()}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "So: "}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages.0.content"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
                ]
            },
            "messages.0.content",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "So: ("}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"messages": user({"type": "video"})}, "messages.0.content.0.type"),
        ({"messages": user({"type": "image", "source": {}})}, "messages.0.content.0"),
        ({"messages": user({"type": "tool_use"})}, "messages.0.content.0.type"),
        ({"messages": user({"text": "a"})}, "messages.0.content.0.type"),
        ({"messages": user({"type": "text"})}, "messages.0.content.0.text"),
        ({"messages": user({"type": "text", "text": "a", "x": 1})}, "messages.0.content.0.x"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "x"})},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {
                "messages": user(
                    {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "video"}]}
                )
            },
            "messages.0.content.0.content.0.type",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"name": "depth"}]}, "tools.0.input_schema"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "endless"}}, "thinking.type"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type"),
        ({"tools": [{**TOOL, "defer_loading": 0}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
        ),
        ({"messages": calling(129)}, "messages"),
        ({"speed": "slow"}, "speed"),
        ({"metadata": "me"}, "metadata"),
        ({"metadata": {"user_id": 7}}, "metadata"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"context_management": {"edits": ["clear"]}}, "context_management"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"n": 2}, "n"),
        ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(members: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat_input(parsed(**members))
    assert caught.value.param == param


def test_a_refusal_says_why() -> None:
    with pytest.raises(InvalidParameter, match="budget") as caught:
        parsed(thinking={"type": "endless"})
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(InvalidParameter, match="neither 'custom' nor a type of Anthropic's"):
        parsed(tools=[{"type": "function", "name": "bash"}])


@pytest.mark.parametrize(
    ("planned", "result"),
    [
        ("chat_template_kwargs", "thinking"),
        ("thinking_token_budget", "thinking"),
        ("messages.7.content", "messages"),
        ("reasoning_effort", "output_config.effort"),
        ("messages", "messages"),
    ],
)
def test_errors_of_planning_name_this_dialects_members(planned: str, result: str) -> None:
    with pytest.raises(InvalidParameter) as caught, renamed_parameters(PARAM_NAMES):
        raise InvalidParameter(planned, f"Unsupported: '{planned}'.", "unsupported_parameter")
    assert caught.value.param == result
    assert f"'{result}'" in caught.value.message


# --- sampling ---


def test_sampling_has_anthropics_names_and_ranges() -> None:
    sampling = message_sampling(
        parsed(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], max_tokens=5), ROOM
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.stop) == (7, ("a", "b"))
    assert sampling.seed is not None
    for members, param in (
        ({"temperature": 1.01}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["a" * 512] * 17}, "stop_sequences"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            message_sampling(parsed(**members), ROOM)
        assert caught.value.param == param


def test_more_tokens_than_the_context_has_left_end_with_the_context() -> None:
    requested = parsed(max_tokens=10**12)
    assert message_sampling(requested, ROOM).max_tokens == ROOM.left
    assert is_cut_by_context(requested, ROOM)
    assert not is_cut_by_context(parsed(max_tokens=ROOM.left), ROOM)


# --- answers ---


@pytest.mark.promise(
    "Clients: Anthropic's SDK works unchanged: messages, streams, tools and their loop, thinking, "
    "counting, models"
)
def test_a_stream_is_what_the_sdk_types() -> None:
    formatter = MessageFormatter(CONTEXT)
    assert formatter.opening() == ()
    events = [*formatter.beginning(cached_tokens=4)]
    for delta in deltas("abc"):
        events += formatter.delta(delta)
    held_back = Delta(Cursor(3, 3), Cursor(4, 3), (3,), "")
    assert list(formatter.delta(held_back)) == []
    events += formatter.finished(finished())
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    started = events[0]["message"]["usage"]
    assert (started["input_tokens"], started["cache_read_input_tokens"]) == (1, 4)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }


def blocks_of(reply: Sequence[OutputEvent]) -> list[dict[str, Any]]:
    blocks = WholeBlocks()
    for event in reply:
        blocks.add(event)
    return blocks.payload()


def test_blocks_follow_the_kinds_of_the_events() -> None:
    reply: list[OutputEvent] = [
        Reasoning("hm"),
        Reasoning("m"),
        Text("Let me"),
        Text(" see."),
        ToolCall(0, "call_a", "depth"),
        ToolArguments(0, '{"gate"'),
        ToolArguments(0, ": 1}"),
        ToolCall(1, "call_b", "flow"),
        ToolArguments(1, "{}"),
        Text("!"),
    ]
    stream = BlockStream()
    pushed = [event for piece in reply for event in stream.push(piece)]
    events = [*pushed, *stream.close(), *stream.close()]
    for event in events:
        EVENT.validate_python(event)
    shape = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert shape == [
        ("start", 0),
        ("delta", 0),
        ("delta", 0),
        ("stop", 0),
        ("start", 1),
        ("delta", 1),
        ("delta", 1),
        ("stop", 1),
        ("start", 2),
        ("delta", 2),
        ("delta", 2),
        ("stop", 2),
        ("start", 3),
        ("delta", 3),
        ("stop", 3),
        ("start", 4),
        ("delta", 4),
        ("stop", 4),
    ]
    assert blocks_of(reply) == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_a", "name": "depth", "input": {"gate": 1}},
        {"type": "tool_use", "id": "call_b", "name": "flow", "input": {}},
        {"type": "text", "text": "!"},
    ]


@pytest.mark.parametrize("arguments", ["", '{"gate": ', "[1]", "7", "{}}"])
def test_a_call_that_was_cut_off_has_no_block_of_its_own(arguments: str) -> None:
    reply = [Text("a"), ToolCall(0, "c", "depth"), ToolArguments(0, arguments)]
    assert blocks_of(reply) == [{"type": "text", "text": "a"}]


def test_a_whole_answer_is_the_message_that_its_stream_makes() -> None:
    def message_formatter() -> MessageFormatter:
        reply = [[Reasoning("h")], [Text("a"), ToolCall(0, "c", "depth")], [ToolArguments(0, "{")]]
        return MessageFormatter(CONTEXT, lambda: ScriptedParser(reply, [ToolArguments(0, "}")]))

    whole = message_formatter()
    for delta in deltas("abc"):
        whole.collect(delta)
    message = whole.whole(finished())
    Message.model_validate(message, strict=True)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    streamed = message_formatter()
    events = [event for delta in deltas("abc") for event in streamed.delta(delta)]
    events += streamed.finished(finished())
    starts = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert starts == ["thinking", "text", "tool_use"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert message["usage"] == {**events[-2]["usage"], "service_tier": "standard"}


@pytest.mark.parametrize(
    ("end", "by_context", "expected"),
    [
        (finished(), False, ("end_turn", None)),
        (finished(stop=7), False, ("end_turn", None)),
        (finished(stop="END"), False, ("stop_sequence", "END")),
        (finished(FinishReason.LENGTH), False, ("max_tokens", None)),
        (finished(FinishReason.LENGTH), True, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_why_it_stopped(
    end: Finished, by_context: bool, expected: tuple[str, str | None]
) -> None:
    context = MessageContext(id="msg_1", model="m", prompt_tokens=5, is_cut_by_context=by_context)
    message = MessageFormatter(context).whole(end)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["content"] == []


# --- errors and models ---


@pytest.mark.parametrize(
    ("status", "shown", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (405, 405, "invalid_request_error"),
        (408, 408, "timeout_error"),
        (409, 409, "conflict_error"),
        (413, 413, "request_too_large"),
        (415, 415, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (502, 502, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, shown: int, kind: str) -> None:
    error = ApiError(status, "why", kind="any", code="code", param="member")
    payload = anthropic_body(error, "msg_1")
    assert anthropic_status(status) == shown
    assert payload == {
        "type": "error",
        "error": {
            "type": kind,
            "message": "why",
            "details": {"error_code": "code", "param": "member"},
        },
        "request_id": "msg_1",
    }
    # The SDK's union of error objects lacks two of those that Anthropic documents.
    if kind not in ("conflict_error", "request_too_large"):
        ErrorResponse.model_validate(payload)
    plain = anthropic_body(ApiError(status, "why", kind="any"), "msg_1")
    assert "details" not in plain["error"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    event = MessageFormatter(CONTEXT).failed(ServerError("no"))
    assert event["type"] == "error"
    assert event["error"]["type"] == "api_error"
    assert b"event: error\ndata: {" in MessageFormatter.framing.event(event)
    assert MessageFormatter.framing.keepalive == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert MessageFormatter.framing.done == b""


def test_models_come_in_pages() -> None:
    models: Any = [
        SimpleNamespace(card=SimpleNamespace(name=name, created_s=0), context_tokens=64)
        for name in "abcde"
    ]

    def page(**query: str) -> tuple[str, bool]:
        found = model_page(models, query)
        return "".join(model.id for model in found.data), found.has_more

    assert page() == ("abcde", False)
    assert page(limit="2") == ("ab", True)
    assert page(limit="2", after_id="b") == ("cd", True)
    assert page(limit="2", after_id="d") == ("e", False)
    assert page(after_id="e") == ("", False)
    assert page(limit="2", before_id="d") == ("bc", True)
    assert page(limit="2", before_id="b") == ("a", False)
    assert model_page(models, {}).data[0].created_at == "1970-01-01T00:00:00Z"
    assert model_page([], {}).first_id is None
    for query in ({"limit": "0"}, {"limit": "x"}, {"after_id": "z"}, {"before_id": "z"}):
        with pytest.raises(InvalidParameter):
            model_page(models, query)


def test_text_needs_no_type_where_nothing_else_is_allowed() -> None:
    request = parsed(system=[{"text": "Be brief."}])
    assert isinstance(request.system, list)
    assert request.system[0].text == "Be brief."


def test_an_unknown_parameter_is_named_before_a_missing_one() -> None:
    with pytest.raises(InvalidParameter) as caught:
        parsed(tools=[{"type": "custom", "custom": {"name": "x"}}])
    assert (caught.value.param, caught.value.code) == ("tools.0.custom", "unsupported_parameter")


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": [1] * 1000}]},
        {"messages": [{"role": "user", "content": 1}] * 1000},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]},
        {"system": [{"text": 1}] * 1000},
    ],
)
def test_a_list_ends_at_its_first_fault(members: dict[str, Any]) -> None:
    base = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ValidationError) as caught:
        MessageRequest.model_validate({**base, **members})
    assert caught.value.error_count() < 8
