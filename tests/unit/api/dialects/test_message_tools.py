"""Tools of the Messages dialect: the caller's, those of Anthropic's, and those that come later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from api.dialects.messages.client_tools import DEFINITIONS, ClientToolType
from api.dialects.messages.protocol import MessageRequest
from api.dialects.messages.request import chat_input
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.tools import ToolUse
from api.generation.validation import parse_request
from shared.messages import InvalidParameter

USER = {"role": "user", "content": "hi"}
READ: dict[str, Any] = {"name": "Read", "input_schema": {"type": "object"}}
SEARCH: dict[str, Any] = {"name": "ToolSearch", "input_schema": {"type": "object"}}
LATER: dict[str, Any] = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
HOSTED = [
    ("web_search_20250305", "web_search"),
    ("web_search_20260318", "web_search"),
    ("web_fetch_20250910", "web_fetch"),
    ("code_execution_20260521", "code_execution"),
    ("advisor_20260301", "advisor"),
    ("computer_20251124", "computer"),
    ("computer_toolset_20260801", None),
    ("browser_toolset_20260801", None),
    ("tool_search_tool_regex_20251119", "tool_search_tool_regex"),
    ("tool_search_tool_bm25", "tool_search_tool_bm25"),
    ("mcp_toolset", None),
]


def served(
    *tools: dict[str, Any], messages: Sequence[Any] = (USER,), **members: Any
) -> tuple[ToolUse, list[str]]:
    ignored = IgnoredMembers()
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), "tools": list(tools)}
    request = parse_request({**body, **members}, MessageRequest, ignored)
    return chat_input(request).tool_use, ignored.names


def names(use: ToolUse) -> list[str]:
    """Returns what the model may call."""
    return [tool.name for tool in use.callable]


def listed(use: ToolUse) -> list[str]:
    """Returns what the prompt lists at its beginning."""
    return [tool.name for tool in use.tools]


@pytest.mark.parametrize(("kind", "name"), HOSTED)
def test_a_tool_of_anthropics_servers_is_left_out_and_named(kind: str, name: str | None) -> None:
    hosted = {"type": kind, "max_uses": 8, "allowed_domains": ["x.test"]}
    if name is not None:
        hosted["name"] = name
    family = kind.rpartition("_20")[0] or kind
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "Read"}):
        use, ignored = served(hosted, READ, tool_choice=choice)
        assert names(use) == ["Read"]
        assert ignored == [f"tools.{family}"]
    use, _ = served(hosted)
    assert use == ToolUse()


def test_a_version_that_is_not_known_is_left_out_too() -> None:
    use, ignored = served(READ, {"type": "oracle_20991231", "name": "oracle"})
    assert (names(use), ignored) == (["Read"], ["tools"])


def test_a_forced_call_of_a_hosted_tool_is_refused() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(InvalidParameter, match="web_search") as refused:
        served(hosted, READ, tool_choice={"type": "tool", "name": "web_search"})
    assert (refused.value.param, refused.value.code) == (
        "tool_choice.name",
        "unsupported_parameter",
    )
    with pytest.raises(InvalidParameter) as refused:
        served(hosted, tool_choice={"type": "any"})
    assert (refused.value.param, refused.value.code) == ("tool_choice", "unsupported_parameter")


@pytest.mark.parametrize("kind", get_args(ClientToolType))
def test_a_tool_that_runs_at_the_client_is_served_with_its_schema(kind: str) -> None:
    use, ignored = served({"type": kind, "name": "its_name", "cache_control": None})
    (tool,) = use.tools
    assert (tool.name, ignored) == ("its_name", [])
    assert tool.parameters == DEFINITIONS[kind].parameters
    assert "command" in tool.parameters["properties"]
    assert ("undo_edit" in str(tool.parameters)) == (
        kind in ("text_editor_20241022", "text_editor_20250124")
    )
    use, _ = served({"type": kind, "name": "x"}, tool_choice={"type": "tool", "name": "x"})
    assert use.must_call


def test_members_without_effect_are_named() -> None:
    tool = {
        **READ,
        "type": "custom",
        "eager_input_streaming": True,
        "input_examples": [{"file_path": "a"}],
        "allowed_callers": ["direct", "code_execution_20260120"],
    }
    use, ignored = served(tool)
    assert names(use) == ["Read"]
    assert ignored == ["tools.input_examples", "tools.allowed_callers"]
    use, ignored = served({**READ, "allowed_callers": ["direct"]})
    assert (names(use), ignored) == (["Read"], [])
    use, ignored = served({**READ, "allowed_callers": ["code_execution_20260120"]})
    assert (names(use), ignored) == ([], ["tools.allowed_callers"])


# --- tools that come later ---


CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
FOUND = [{"type": "tool_reference", "tool_name": "later"}]


def referring(name: str) -> list[dict[str, Any]]:
    """A conversation in which a search found the tool."""
    found = [{"type": "tool_reference", "tool_name": name}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    return [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]


def system(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)}


def added(name: str) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def test_a_deferred_tool_is_offered_once_the_conversation_names_it() -> None:
    assert names(served(SEARCH, LATER)[0]) == ["ToolSearch"]
    assert names(served(SEARCH, LATER, messages=referring("other"))[0]) == ["ToolSearch"]
    both = ["ToolSearch", "later"]
    assert names(served(SEARCH, LATER, messages=referring("later"))[0]) == both
    assert names(served(SEARCH, LATER, messages=[USER, system(added("later"))])[0]) == both
    forced = {"type": "tool", "name": "later"}
    use, _ = served(SEARCH, LATER, tool_choice=forced)
    assert (names(use), listed(use)) == (["later"], both)
    call = {"type": "tool_use", "id": "c", "name": "later", "input": {}}
    called = [USER, {"role": "assistant", "content": [call]}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
    assert names(served(SEARCH, LATER, messages=[*called, result])[0]) == both


def test_a_deferred_tool_that_nothing_can_find_is_offered_at_once() -> None:
    assert names(served(LATER)[0]) == ["later"]
    hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert names(served(hosted, READ, LATER)[0]) == ["Read", "later"]


def test_a_removed_tool_is_not_offered_until_it_is_added_again() -> None:
    messages: list[Any] = [USER, system(removed("Read"))]
    assert names(served(READ, SEARCH, messages=messages)[0]) == ["ToolSearch"]
    messages.append(system(added("Read")))
    assert names(served(READ, SEARCH, messages=messages)[0]) == ["Read", "ToolSearch"]


def test_a_tool_may_be_defined_in_a_message() -> None:
    def defined(tool: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}

    use, ignored = served(READ, messages=[USER, system(defined(SEARCH))])
    assert (names(use), ignored) == (["Read", "ToolSearch"], [])
    anew = {**READ, "description": "anew"}
    use, _ = served(READ, messages=[USER, system(defined(anew))])
    assert [tool.description for tool in use.callable] == ["anew"]
    hosted = {"type": "web_fetch_20250910", "name": "web_fetch"}
    use, ignored = served(READ, messages=[USER, system(defined(hosted))])
    assert (names(use), ignored) == (["Read"], ["tools.web_fetch"])
    broken = {**READ, "name": "x", "input_schema": {"type": "array"}}
    with pytest.raises(InvalidParameter) as refused:
        served(messages=[USER, system(defined(broken))])
    assert refused.value.param == "messages.1.content.0.tool.definition.input_schema.type"


def text_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"text": content}] if isinstance(content, str) else content


def test_a_conversation_that_finds_tools_keeps_its_prompt_and_tells_of_them() -> None:
    def prompt(*messages: Any) -> tuple[list[Any], list[Any]]:
        body = {"model": "m", "max_tokens": 9, "tools": [READ, SEARCH, LATER]}
        request = parse_request({**body, "messages": list(messages)}, MessageRequest)
        chat = chat_input(request)
        return [tool.definition() for tool in chat.tool_use.tools], list(chat.messages)

    definition = {"type": "tool_definition", "definition": {**READ, "description": "anew"}}
    again = {"role": "assistant", "content": [{**CALL, "id": "u"}]}
    found = {"type": "tool_result", "tool_use_id": "u", "content": FOUND}
    messages: list[Any] = [
        *referring("later"),
        again,
        {"role": "user", "content": [found]},
        system(removed("Read")),
        USER,
        system({"type": "tool_addition", "tool": definition}),
        system(added("later"), {"type": "text", "text": "Be brief."}),
    ]
    tools, before = prompt(USER)
    texts = []
    for end in (3, 5, 6, 7, 8, 9):
        same_tools, turns = prompt(*messages[:end])
        assert same_tools == tools
        kept = json.dumps(before).removesuffix("]}]").removesuffix('"}]')
        assert json.dumps(turns).startswith(kept)
        before = turns
        texts.append("\n".join(part["text"] for part in text_parts(turns[-1]["content"])))
    assert "'later' is available: {" in texts[0]
    assert "'later' is available." in texts[1]  # it is defined once
    assert "'Read' is no longer available." in texts[2]
    assert "anew" in texts[4]
    assert "Be brief." in texts[5]


def test_a_billing_header_is_no_part_of_the_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.6e4;"}
    body = {"model": "m", "max_tokens": 9, "messages": [USER]}
    brief = {"type": "text", "text": "Be brief."}
    for blocks, shown in (([header, brief], ["Be brief."]), ([header], [])):
        request = parse_request({**body, "system": blocks}, MessageRequest)
        messages = chat_input(request).messages
        texts = [part["text"] for each in messages[:-1] for part in each["content"]]
        assert texts == shown


def test_what_only_a_call_names_is_listed_and_stays_so() -> None:
    call = {"role": "assistant", "content": [{**CALL, "name": "later"}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
    both = ["ToolSearch", "later"]
    assert listed(served(SEARCH, LATER, messages=[USER, call, result])[0]) == both
    then = [USER, call, result, system(added("later"))]
    assert listed(served(SEARCH, LATER, messages=then)[0]) == both


def test_tools_are_listed_where_nothing_else_would_be() -> None:
    definition = {"type": "tool_definition", "definition": READ}
    added_one = system({"type": "tool_addition", "tool": definition})
    assert listed(served(messages=[USER, added_one])[0]) == ["Read"]


def test_tools_of_a_servers_mcp_are_left_out_and_named() -> None:
    reference = {"type": "mcp_tool_reference", "server_name": "s", "name": "t"}
    block = {"type": "tool_addition", "tool": reference}
    use, ignored = served(READ, messages=[USER, system(block)])
    assert (names(use), ignored) == (["Read"], ["messages.content.tool_addition"])


def test_a_summary_keeps_the_changes_of_what_it_summarizes() -> None:
    block = {"type": "compaction", "content": "We read.", "tool_changes": [added("later")]}
    messages = [{"role": "user", "content": [block]}, USER]
    assert names(served(SEARCH, LATER, messages=messages)[0]) == ["ToolSearch", "later"]
