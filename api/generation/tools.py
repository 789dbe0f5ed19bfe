"""The tools of a request: checked, and what may be called of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import MAX_ECHO_CHARS, unknown_parameter, unsupported
from shared.messages import InvalidParameter

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# Of a function that takes none.
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_FUNCTION = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `path` names it in errors: `tools.0.function`."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool
    path: str

    def definition(self) -> dict[str, Any]:
        """What a chat template is given."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model do with its tools.

    `tools` are shown to the model, `callable` are those of them that it may call: none when it must
    not call any. `must_call`: the answer is one call or more. `parallel`: more than one call to a
    turn.
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        """Whether the text has to be kept to a grammar for this to hold."""
        restricted = len(self.callable) < len(self.tools) or not self.parallel
        strict = any(tool.strict for tool in self.callable)
        return self.must_call or (bool(self.callable) and (restricted or strict))


def read_tool_use(tools: Sequence[Any], choice: object, parallel: bool) -> ToolUse:
    """The members `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidParameter.

    Without a choice it is "auto" where there are tools. With "none" they are not shown to the model
    either: what it does not know it cannot call. A function by name is called once, whatever
    `parallel` says, as at OpenAI and vLLM: clients read the first call as the answer.
    """
    checked = _tools(tools)
    if choice is None or choice == "auto":
        return ToolUse(checked, checked, parallel=parallel)
    if choice == "none":
        return ToolUse()
    if choice == "required":
        return ToolUse(checked, _any_of(checked), must_call=True, parallel=parallel)
    if isinstance(choice, str):
        raise InvalidParameter("tool_choice", "must be 'none', 'auto', 'required' or an object")
    if not isinstance(choice, Mapping):
        raise InvalidParameter("tool_choice", "must be a string or an object")
    if choice.get("type") == "function":
        _only(choice, "tool_choice", ("type", "function"))
        named = (_named(choice, "tool_choice", _any_of(checked)),)
        return ToolUse(checked, named, must_call=True, parallel=False)
    if choice.get("type") == "allowed_tools":
        _only(choice, "tool_choice", ("type", "allowed_tools"))
        return _allowed(choice.get("allowed_tools"), _any_of(checked), parallel)
    kind = str(choice.get("type"))[:MAX_ECHO_CHARS]
    raise unsupported("tool_choice.type", f"a choice of type '{kind}' is not served")


def _tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"at most {MAX_TOOLS} tools")
    checked = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for tool in checked:
        if tool.name in seen:
            raise InvalidParameter(f"{tool.path}.name", "is the name of another tool")
        seen.add(tool.name)
    return checked


def _tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidParameter(path, "must be an object")
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:MAX_ECHO_CHARS]
        raise unsupported(f"{path}.type", f"tools of type '{kind}' are not served, only 'function'")
    _only(tool, path, ("type", "function"))
    path = f"{path}.function"
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(path, "must be an object")
    _only(function, path, _FUNCTION)
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidParameter(
            f"{path}.name", "must have 1 to 128 letters, digits, underscores and dashes"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidParameter(f"{path}.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise InvalidParameter(f"{path}.parameters", "must be an object: a JSON schema")
    if parameters.get("type", "object") != "object":
        raise InvalidParameter(f"{path}.parameters.type", "must be 'object'")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidParameter(f"{path}.strict", "must be a boolean")
    return Tool(name, description, parameters or NO_PARAMETERS, bool(strict), path)


def _any_of(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if not tools:
        raise InvalidParameter("tool_choice", "is only allowed when 'tools' are given")
    return tools


def _named(choice: Mapping[str, Any], path: str, tools: tuple[Tool, ...]) -> Tool:
    function = choice.get("function")
    path = f"{path}.function"
    if not isinstance(function, Mapping):
        raise InvalidParameter(path, "must be an object with the name of a tool")
    _only(function, path, ("name",))
    for tool in tools:
        if tool.name == function.get("name"):
            return tool
    raise InvalidParameter(f"{path}.name", "must be the name of one of 'tools'")


def _allowed(allowed: object, tools: tuple[Tool, ...], parallel: bool) -> ToolUse:
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise InvalidParameter(path, "must be an object")
    _only(allowed, path, ("mode", "tools"))
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidParameter(f"{path}.mode", "must be 'auto' or 'required'")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise InvalidParameter(f"{path}.tools", "must be a list of one or more tools")
    names = set()
    for index, choice in enumerate(listed):
        at = f"{path}.tools.{index}"
        if not isinstance(choice, Mapping) or choice.get("type") != "function":
            raise InvalidParameter(at, "must be an object of type 'function'")
        _only(choice, at, ("type", "function"))
        names.add(_named(choice, at, tools).name)
    may_call = tuple(tool for tool in tools if tool.name in names)
    return ToolUse(tools, may_call, allowed["mode"] == "required", parallel)


def _only(value: Mapping[str, Any], path: str, names: Sequence[str]) -> None:
    for name, member in value.items():
        if name not in names and member is not None:
            raise unknown_parameter(f"{path}.{name!s}")


# With one of these an object may have properties that are not in its `properties`.
_ADMIT_OTHERS = (
    *("additionalProperties", "patternProperties", "minProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
)


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema that the arguments of an enforced call are kept to."""
    schema = {"type": "object", **parameters}
    if parameters is NO_PARAMETERS or _names_all(schema):
        schema["additionalProperties"] = False
    return schema


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema names its properties and does not mention others.

    JSON schema admits others then, but a function does not take them: a call with one fails.
    """
    properties = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not any(keyword in schema for keyword in _ADMIT_OTHERS)
    )
