"""What a Responses request asks of the model, in the members of ChatAsk.

The tools, the choice among them and the format of the text have the same members as in chat
completions, one level less deep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from api.chat_plan import ChatAsk
from api.errors import MAX_ECHO_CHARS, renaming, unsupported
from api.responses.conversation import chat_messages
from api.responses.items import Item
from api.responses.schemas import ResponseReasoning, ResponseRequest
from shared.messages import InvalidParameter

Tool = Mapping[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_SCHEMA = ("name", "description", "schema", "strict")
# Members of a function tool that ask for nothing when they are so.
_INERT: Mapping[str, object] = {
    "allowed_callers": ["direct"],
    "async": False,
    "defer_loading": False,
}

# a member of ChatAsk, as planning names it -> as this dialect does
_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^tool_choice\.allowed_tools\.tools\.(\d+)\.function"), r"tool_choice.tools.\1"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    # The messages are not the request's items: which of them it is would be a guess.
    (re.compile(r"^messages.*", re.DOTALL), "input"),
)


def chat_ask(request: ResponseRequest, items: Sequence[Item], job_id: str) -> ChatAsk:
    """`items`: the whole conversation, the request's own last. Raises InvalidParameter."""
    _check_reasoning(request.reasoning)
    return ChatAsk(
        messages=chat_messages(request.instructions, items),
        tools=[_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format),
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort,
        call_id_seed=job_id,
    )


def in_this_dialect() -> AbstractContextManager[None]:
    """Errors of planning name the members that the caller sent."""
    return renaming(_RENAMED)


def _check_reasoning(reasoning: ResponseReasoning) -> None:
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            raise InvalidParameter(
                f"reasoning.{name}", "must be 'auto', 'concise' or 'detailed', and changes nothing"
            )
    for name in ("context", "mode"):
        if getattr(reasoning, name) is not None:
            raise unsupported(f"reasoning.{name}", "it cannot be set")


def _chat_tool(tool: Tool, path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        echoed = str(kind)[:MAX_ECHO_CHARS]
        raise unsupported(
            f"{path}.type", f"tools of type '{echoed}' are not served, only 'function'"
        )
    function: dict[str, Any] = {}
    for name, value in tool.items():
        if name in _FUNCTION:
            if value is not None:
                function[name] = value
        elif name != "type" and value is not None and value != _INERT.get(name):
            raise unsupported(f"{path}.{name[:MAX_ECHO_CHARS]}", "it is not known here")
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        _only(choice, "tool_choice", "type", "name")
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        echoed = str(kind)[:MAX_ECHO_CHARS]
        raise unsupported("tool_choice.type", f"choices of type '{echoed}' are not served")
    _only(choice, "tool_choice", "type", "mode", "tools")
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidParameter("tool_choice.tools", "must be a list of tools")
    allowed = [_allowed(tool, f"tool_choice.tools.{n}") for n, tool in enumerate(tools)]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.get("mode"), "tools": allowed},
    }


def _allowed(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidParameter(path, "must be an object of type 'function'")
    return {"type": "function", "function": {"name": tool.get("name")}}


def _response_format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind == "text":
        _only(text_format, "text.format", "type")
        return None
    if kind != "json_schema":
        return dict(text_format)
    _only(text_format, "text.format", "type", *_SCHEMA)
    schema = {name: text_format[name] for name in _SCHEMA if text_format.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _only(value: Mapping[str, Any], path: str, *names: str) -> None:
    for name in value:
        if name not in names:
            raise unsupported(f"{path}.{name[:MAX_ECHO_CHARS]}", "it is not known here")
