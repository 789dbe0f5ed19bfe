"""Items and messages: what a Responses request says, and the conversation that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from api.dialects.responses.conversation import chat_messages, check_calls
from api.dialects.responses.items import input_items, items_of_page, references
from api.dialects.responses.protocol import ItemsQuery, ResponseRequest, check_request
from api.dialects.responses.request import (
    PARAM_NAMES,
    chat_input,
    response_sampling,
)
from api.dialects.responses.shown_tools import offered_tools
from api.generation.prompt import ChatInput
from api.generation.sampling import ContextBudget, renamed_parameters
from api.generation.tools import MAX_TOOLS
from api.generation.validation import parse_request
from shared.messages import InvalidParameter
from tests.unit.api.dialects.response_logs import JOB_ID

CALL = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"x": 1}'}
LOCAL_CALL = {
    **{"type": "local_shell_call", "call_id": "c2"},
    "action": {"type": "exec", "command": ["ls"]},
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": True}


def request(**members: Any) -> ResponseRequest:
    return parse_request({"model": "m", "input": "hi", **members}, ResponseRequest)


def items_of(*items: Any) -> list[Any]:
    return input_items(request(input=list(items)).input, JOB_ID)


def requested(*items: Any, **members: Any) -> ChatInput:
    made = request(**({"input": list(items)} if items else {}), **members)
    return chat_input(made, input_items(made.input, JOB_ID), JOB_ID)


def test_the_tools_in_namespaces_are_counted() -> None:
    def space(name: str, count: int) -> dict[str, Any]:
        inner = [{**TOOL, "name": f"{name}{index}"} for index in range(count)]
        return {"type": "namespace", "name": name, "tools": inner}

    half = MAX_TOOLS // 2
    spaces = [space("a", half), space("b", half)]
    assert len(offered_tools(request(tools=spaces).tools, []).shown) == MAX_TOOLS
    found = {"type": "additional_tools", "role": "developer", "tools": [TOOL]}
    for tools, items in (([*spaces, TOOL], []), (spaces, items_of(found))):
        with pytest.raises(InvalidParameter, match="those in namespaces included") as refused:
            offered_tools(request(tools=tools).tools, items)
        assert refused.value.param == "tools"


def test_formats_that_are_not_enforced_are_few_names() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    tools = [{"type": "custom", "name": f"t{index}", "format": form} for index in range(40)]
    found = offered_tools(request(tools=tools).tools, [])
    assert found.unkept == [*(f"tools.{index}.format" for index in range(16)), "tools.format"]


def test_text_is_a_message_of_the_user() -> None:
    (item,) = input_items("hi", JOB_ID)
    assert item == {
        "id": f"msg_{JOB_ID}_in0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert requested().messages == [{"role": "user", "content": "hi"}]


def test_instructions_come_first() -> None:
    assert requested(instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_every_kind_become_messages() -> None:
    ask = requested(
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
        | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
            ],
        },
        {**CALL, "id": "fc_1", "status": "completed", "parsed_arguments": {"x": 1}},
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "But yes."},
        CALL | {"call_id": "c3"},
        {"role": "user", "content": "and?"},
    )

    def call(call_id: str) -> dict[str, Any]:
        function = {"name": "get", "arguments": '{"x": 1}'}
        return {"id": call_id, "type": "function", "function": function}

    assert ask.messages == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("c1"), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "get"},
        {"role": "tool", "tool_call_id": "c2", "content": "3", "name": "get"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "But yes.", "tool_calls": [call("c3")]},
        {"role": "user", "content": "and?"},
    ]


def test_summaries_stand_in_for_hidden_reasoning() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert requested(summary, {"role": "user", "content": "x"}).messages[0] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "short",
    }


def test_kept_items_have_ids_of_their_own_response() -> None:
    items = items_of({"role": "user", "content": "a", "id": "msg_theirs"}, CALL, OUTPUT)
    assert [item["id"] for item in items] == [
        f"msg_{JOB_ID}_in0",
        f"fc_{JOB_ID}_in1",
        f"fco_{JOB_ID}_in2",
    ]


def test_an_item_with_only_an_id_is_a_reference() -> None:
    made = request(input=[{"id": "rs_1"}, {"type": "item_reference", "id": "rs_1"}, CALL])
    nulls = request(input=[{"id": "rs_1", "type": None, "role": None}])
    assert references(made.input) == ["rs_1", "rs_1"]
    assert references(nulls.input) == ["rs_1"]
    assert references("rs_1") == []


def test_a_reference_is_kept_as_a_copy_of_its_item() -> None:
    (call,) = input_items(request(input=[LOCAL_CALL]).input, "0-earlier")
    named = {"type": "item_reference", "id": call["id"]}
    output = {"type": "local_shell_call_output", "id": call["id"], "output": "a"}
    items = input_items(request(input=[named, output]).input, JOB_ID, {call["id"]: call})
    assert items[0] == {**call, "id": f"lsh_{JOB_ID}_in0"}
    assert items[1]["call_id"] == LOCAL_CALL["call_id"]  # the item that was meant by its id


def test_an_output_needs_its_call_before_it() -> None:
    call, output = items_of(CALL, OUTPUT)
    check_calls([], [call, output])
    check_calls([call], [output])
    with pytest.raises(InvalidParameter, match=r"input\.0\.call_id"):
        check_calls([], [output, call])


@pytest.mark.promise("Responses: unsupported parameters are refused by name")
@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("hi", "input.0"),
        ({"content": "hi"}, "input.0.role"),
        ({"role": "user"}, "input.0.content"),
        ({"role": "user", "content": []}, "input.0.content"),
        ({"role": "tool", "content": "hi"}, "input.0.role"),
        ({"role": "user", "content": "hi", "phase": "commentary"}, "input.0.phase"),
        ({"role": "user", "content": "hi", "cat": 1}, "input.0.cat"),
        ({"role": "user", "content": "hi", "status": "done"}, "input.0.status"),
        ({"role": "user", "content": ["hi"]}, "input.0.content.0"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.0.content.0.text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.0.content.0"),
        ({"role": "user", "content": [{"type": "input_cat"}]}, "input.0.content.0.type"),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "n"}]},
            "input.0.content.0.type",
        ),
        ({"type": "item_reference"}, "input.0.id"),
        ({"type": "item_reference", "id": "msg_1", "role": "user"}, "input.0.role"),
        ({"type": "message", "id": "msg_1"}, "input.0.role"),
        ({"type": "cat_call"}, "input.0.type"),
        ({"type": 1}, "input.0.type"),
        ({**CALL, "arguments": {}}, "input.0.arguments"),
        ({**CALL, "namespace": 1}, "input.0.namespace"),
        ({**OUTPUT, "output": 1}, "input.0.output"),
        ({**OUTPUT, "output": [{"type": "input_cat"}]}, "input.0.output.0.type"),
        ({"type": "reasoning", "summary": "s"}, "input.0.summary"),
    ],
)
def test_a_bad_item_is_refused_by_name(item: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        items_of(item)
    assert refused.value.param == param


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="input"):
        items_of()


def test_tools_and_their_choice_are_those_of_chat() -> None:
    put = {**TOOL, "name": "put", "description": None, "strict": False, "defer_loading": False}
    use = requested(tools=[TOOL, put], tool_choice="required").tool_use
    function = {"name": "get", "parameters": {"type": "object"}}
    assert use.tools[0].definition() == {"type": "function", "function": function}
    assert [tool.strict for tool in use.tools] == [True, False]
    assert (use.must_call, use.parallel) == (True, True)
    named = requested(tools=[TOOL, put], tool_choice={"type": "function", "name": "get"}).tool_use
    assert ([tool.name for tool in named.callable], named.parallel) == (["get"], False)
    choice = {"type": "allowed_tools", "mode": "required", "tools": [TOOL]}
    some = requested(tools=[put, TOOL], tool_choice=choice).tool_use
    assert [tool.name for tool in some.tools] == ["put", "get"]
    assert ([tool.name for tool in some.callable], some.must_call) == (["get"], True)


def test_the_format_of_the_text_becomes_a_grammar() -> None:
    assert requested(text={"format": {"type": "text"}}).output is None
    assert requested(text={"format": None}).output is None
    any_object = requested(text={"format": {"type": "json_object"}}).output
    assert any_object is not None
    assert any_object.param == "text.format"
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True, "description": None}
    output = requested(text={"format": {"type": "json_schema", **schema}}).output
    assert output is not None
    assert output.param == "text.format.schema"
    assert output.grammar == any_object.grammar


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{"type": "cat_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [{**TOOL, "defer_loading": 0}]}, "tools.0.defer_loading"),
        ({"tools": [{**TOOL, "async": 0}]}, "tools.0.async"),
        ({"tools": [{**TOOL, "allowed_callers": ["other"]}]}, "tools.0.allowed_callers"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools.0.name",
        ),
        ({"input": [CALL, CALL]}, "input"),
        ({"input": [{**CALL, "call_id": str(n)} for n in range(129)]}, "input"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "cat"}}, "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get", "x": 1}},
            "tool_choice.x",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": ["get"]}},
            "tool_choice.tools.0",
        ),
        ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(members: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        requested(**members)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"text": {"cat": 1}}, "text.cat"),
    ],
)
def test_what_is_not_served_is_refused_by_name(members: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        check_request(request(**members))
    assert refused.value.param == param


def test_what_asks_for_what_happens_anyway_is_accepted() -> None:
    check_request(
        request(
            truncation="disabled",
            service_tier="auto",
            max_tool_calls=None,
            text={"format": {"type": "text"}, "verbosity": None},
            reasoning={"effort": None},
            metadata={"k": "v"},
            include=["message.output_text.logprobs"],
            top_logprobs=3,
        )
    )


@pytest.mark.parametrize(
    ("result", "param"),
    [
        ("reasoning_effort", "reasoning.effort"),
        ("messages.3.content", "input"),
        ("chat_template_kwargs", "chat_template_kwargs"),
    ],
)
def test_errors_of_planning_name_what_the_caller_sent(result: str, param: str) -> None:
    with pytest.raises(InvalidParameter) as refused, renamed_parameters(PARAM_NAMES):
        raise InvalidParameter(result, "is wrong")
    assert refused.value.param == param


def test_sampling_is_chats_under_its_names_here() -> None:
    room = ContextBudget(context_tokens=64, vocab_size=100, prompt_tokens=4)
    sampling = response_sampling(
        request(
            max_output_tokens=5,
            temperature=0.5,
            top_p=0.9,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            seed=1,
            ignore_eos=True,
        ),
        room,
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.logprobs, sampling.seed, sampling.ignore_eos) == (2, 1, True)
    assert response_sampling(request(), room).max_tokens == 60
    assert response_sampling(request(max_output_tokens=61), room).max_tokens == 60
    with pytest.raises(InvalidParameter) as refused:
        response_sampling(request(max_output_tokens=0), room)
    assert refused.value.param == "max_output_tokens"


def test_items_are_listed_in_pages_newest_first() -> None:
    items = items_of(*({"role": "user", "content": str(n)} for n in range(5)))
    backwards = items[::-1]
    assert items_of_page(items, "desc", None, 2) == backwards[:3]  # one more than the page
    assert items_of_page(items, "desc", backwards[1]["id"], 20) == backwards[2:]
    assert items_of_page(items, "asc", None, 20) == items
    with pytest.raises(InvalidParameter):
        items_of_page(items, "asc", "msg_1", 20)
    with pytest.raises(ValidationError):
        ItemsQuery.model_validate({"order": "up"})


def test_a_conversation_without_instructions_has_no_system_message() -> None:
    assert chat_messages(None, input_items("a", JOB_ID), {})[0]["role"] == "user"
    assert chat_messages("", input_items("a", JOB_ID), {})[0]["role"] == "user"
