"""Tools that a Responses conversation finds, and those that a summary of it keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.dialects.responses.calls import CallTarget
from api.dialects.responses.conversation import SUMMARY_REQUEST
from api.dialects.responses.items import input_items
from api.dialects.responses.protocol import CompactRequest, ResponseRequest
from api.dialects.responses.request import chat_input
from api.dialects.responses.shown_tools import ShownTools, offered_tools
from api.generation.prompt import ChatInput
from api.generation.tools import MAX_TOOLS, ToolUse
from api.generation.validation import parse_request
from shared.messages import InvalidParameter
from tests.unit.api.dialects.response_logs import JOB_ID

USER = {"role": "user", "content": "hi"}
READ: dict[str, Any] = {"type": "function", "name": "read"}
LATER: dict[str, Any] = {"type": "function", "name": "later", "description": "Comes later: é."}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client"}
TOOLS = [READ, SEARCH]


def requested(
    *items: Any, kind: type[ResponseRequest] = ResponseRequest, **members: Any
) -> ChatInput:
    made = parse_request({"model": "m", "input": list(items), **members}, kind)
    return chat_input(made, input_items(made.input, JOB_ID), JOB_ID)


def offered(*items: Any, tools: Any = (), enforced: bool = True) -> ShownTools:
    made = parse_request({"model": "m", "input": list(items), "tools": tools}, ResponseRequest)
    return offered_tools(made.tools, input_items(made.input, JOB_ID), enforced=enforced)


def searched(call_id: str, *found: dict[str, Any]) -> list[dict[str, Any]]:
    """A search that the client made, and the tools that it found."""
    call = {"type": "tool_search_call", "call_id": call_id, "execution": "client"}
    return [{**call, "arguments": {}}, result_of(found, call_id=call_id)]


def result_of(found: Any, **members: str) -> dict[str, Any]:
    return {"type": "tool_search_output", "execution": "client", "tools": list(found), **members}


def added(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def listed(use: ToolUse) -> list[str]:
    """Returns what the prompt lists at its beginning."""
    return [tool.name for tool in use.tools]


def callable_names(use: ToolUse) -> list[str]:
    return [tool.name for tool in use.callable]


def test_a_conversation_that_finds_tools_keeps_its_prompt_and_tells_of_them() -> None:
    more = {**LATER, "name": "more"}
    turns = [
        [USER],
        searched("a", LATER),
        searched("b", LATER, READ),
        [added(more, LATER), USER],
        searched("c"),
    ]
    items: list[Any] = []
    before: list[Any] = []
    for turn in turns:
        items += turn
        chat = requested(*items, tools=TOOLS)
        assert listed(chat.tool_use) == ["read", "tool_search"]
        assert chat.messages[: len(before)] == before
        before = list(chat.messages)
    assert callable_names(chat.tool_use) == ["read", "tool_search", "later", "more"]
    first, second, third = [one["content"] for one in before if one["role"] == "tool"]
    name, _, definition = first.partition(": ")
    assert name == "The tool 'later' is available"
    assert json.loads(definition) == next(
        tool.definition() for tool in chat.tool_use.callable if tool.name == "later"
    )
    assert "é" in definition
    assert second == "The tool 'later' is available.\nThe tool 'read' is available."
    assert third == "No tools found."
    (system,) = [one["content"] for one in before if one["role"] == "system"]
    defined, known = system.split("\n")
    assert defined.startswith("The tool 'more' is available: {")
    assert known == "The tool 'later' is available."


@pytest.mark.parametrize("members", [{}, {"call_id": "nobody"}])
def test_what_a_servers_search_found_is_listed_and_no_message_tells_of_it(
    members: dict[str, str],
) -> None:
    """It has no call in the conversation that it could be the result of."""
    chat = requested(USER, result_of([LATER], **members), USER, tools=TOOLS)
    assert listed(chat.tool_use) == ["read", "tool_search", "later"]
    assert [message["content"] for message in chat.messages] == ["hi", "hi"]
    then = requested(USER, result_of([LATER], **members), added(LATER), USER, tools=TOOLS)
    assert listed(then.tool_use) == listed(chat.tool_use)
    assert then.messages[1]["content"] == "The tool 'later' is available."


def test_all_tools_are_listed_where_the_request_has_none() -> None:
    chat = requested(added(READ), USER, *searched("a", LATER))
    assert listed(chat.tool_use) == ["read", "later"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[-1]["content"] == "The tool 'later' is available."


def test_a_found_tool_may_be_chosen_and_the_list_stays() -> None:
    named = {"type": "function", "name": "later"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, allowed):
        use = requested(USER, *searched("a", LATER), tools=TOOLS, tool_choice=choice).tool_use
        assert (callable_names(use), listed(use)) == (["later"], ["read", "tool_search"])
        assert use.must_call
    with pytest.raises(InvalidParameter) as refused:
        requested(USER, tools=TOOLS, tool_choice=named)
    assert refused.value.param == "tool_choice.name"


def test_calls_of_found_tools_become_items_of_their_kind() -> None:
    word = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    space = {
        "type": "namespace",
        "name": "maps",
        "description": "Maps.",
        "tools": [LATER, {"type": "custom", "name": "note", "format": word}],
    }
    for enforced in (True, False):
        tools = offered(USER, *searched("a", space), tools=TOOLS, enforced=enforced)
        later, note = tools.shown[2:]
        assert later[0].name == "maps__later"
        assert later[1] == CallTarget("function", "later", "maps")
        assert note[1] == CallTarget("custom", "note", "maps")
        assert note[0].strict == enforced  # its grammar can be enforced, where any can
        assert '"maps__note"' in tools.found[2]


def test_tools_of_a_request_and_of_its_items_are_counted_together() -> None:
    found = [{**LATER, "name": f"t{number}"} for number in range(MAX_TOOLS - 1)]
    assert len(offered(USER, *searched("a", *found), tools=[READ]).shown) == MAX_TOOLS
    assert len(offered(USER, *searched("a", *found, READ), tools=[READ]).shown) == MAX_TOOLS
    with pytest.raises(InvalidParameter, match="tools"):
        offered(USER, *searched("a", *found, LATER), tools=[READ])


@pytest.mark.parametrize("is_triggered", [False, True])
@pytest.mark.parametrize(
    ("tools", "names"), [([], ["later", "read"]), (TOOLS, ["read", "tool_search"])]
)
def test_a_summary_keeps_the_prompt_of_its_conversation(
    is_triggered: bool, tools: list[dict[str, Any]], names: list[str]
) -> None:
    """Its list of tools too, so that the prefix lasts; but the model cannot call any."""
    items: list[Any] = [USER, *searched("a", LATER), added(READ), USER]
    asked: dict[str, Any] = {"tools": tools, "instructions": "Be brief.", "tool_choice": "required"}
    plain = requested(*items, **asked)
    form = {"text": {"format": {"type": "json_object"}}}
    if is_triggered:
        summary = requested(*items, {"type": "compaction_trigger"}, **asked, **form)
    else:
        summary = requested(*items, kind=CompactRequest, **asked, **form)
    assert summary.tool_use.tools == plain.tool_use.tools
    assert listed(summary.tool_use) == names
    assert list(summary.messages) == [*plain.messages, {"role": "user", "content": SUMMARY_REQUEST}]
    assert (summary.tool_use.callable, summary.tool_use.must_call) == ((), False)
    assert summary.output is None
