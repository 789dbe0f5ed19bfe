"""Calls of tools: the item of each kind of tool, and the function call that a model knows it as."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

Item = dict[str, Any]

FUNCTION = "function"
CUSTOM = "custom"
LOCAL_SHELL = "local_shell"
SHELL = "shell"
APPLY_PATCH = "apply_patch"
TOOL_SEARCH = "tool_search"

INPUT = "input"  # the parameter that has a custom tool's input
_SEPARATOR = "__"  # between a namespace and a name


class CallTarget(msgspec.Struct, frozen=True, array_like=True):
    """The kind of a tool, and the name that its client knows it by."""

    kind: str
    name: str
    namespace: str | None = None


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name that a model knows a tool by."""
    if namespace is None:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


# From items to function calls.


class FunctionCall(NamedTuple):
    """A call as chat templates know it; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def _members(value: Mapping[str, Any]) -> str:
    present = {name: member for name, member in value.items() if member is not None}
    return json.dumps(present, ensure_ascii=False)


def _of_function(item: Item) -> FunctionCall:
    return FunctionCall(flat_name(item["name"], item.get("namespace")), item["arguments"])


def _of_custom(item: Item) -> FunctionCall:
    name = flat_name(item["name"], item.get("namespace"))
    return FunctionCall(name, _members({INPUT: item["input"]}))


def _of_local_shell(item: Item) -> FunctionCall:
    action = {name: value for name, value in item["action"].items() if name != "type" and value}
    return FunctionCall(LOCAL_SHELL, _members(action))


def _of_tool_search(item: Item) -> FunctionCall:
    arguments = item["arguments"]
    return FunctionCall(
        TOOL_SEARCH, arguments if isinstance(arguments, str) else json.dumps(arguments)
    )


_CALLS: Mapping[str, Callable[[Item], FunctionCall]] = {
    "function_call": _of_function,
    "custom_tool_call": _of_custom,
    "local_shell_call": _of_local_shell,
    "shell_call": lambda item: FunctionCall(SHELL, _members(item["action"])),
    "apply_patch_call": lambda item: FunctionCall(APPLY_PATCH, _members(item["operation"])),
    "tool_search_call": _of_tool_search,
}


def is_call(item: Item) -> bool:
    """Returns whether an item is a call of a tool that the client runs."""
    return item["type"] in _CALLS


def function_call(item: Item) -> FunctionCall:
    """Returns the call that an item of `is_call` stands for."""
    return _CALLS[item["type"]](item)


def _shell_output(item: Item) -> str:
    """Returns what the commands of a shell wrote, each with how it ended."""
    texts = []
    for entry in item["output"]:
        outcome = entry["outcome"]
        code = outcome.get("exit_code", "unknown")
        end = "timed out" if outcome["type"] == "timeout" else f"exit code {code}"
        texts += [text for text in (entry["stdout"], entry["stderr"], f"[{end}]") if text]
    return "\n".join(texts)


def _patch_output(item: Item) -> str:
    output = item.get("output")
    return f"{item['status']}: {output}" if output else str(item["status"])


_OUTPUTS: Mapping[str, Callable[[Item], Any]] = {
    "function_call_output": lambda item: item["output"],
    "custom_tool_call_output": lambda item: item["output"],
    "local_shell_call_output": lambda item: item["output"],
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
}


def is_call_output(item: Item) -> bool:
    """Returns whether an item is the result of a call."""
    return item["type"] in _OUTPUTS or item["type"] == "tool_search_output"


def call_output(item: Item) -> Any:
    """Returns the text of a result of `is_call_output`, or its parts; that of a search is in
    ShownTools."""
    return _OUTPUTS[item["type"]](item)


# From function calls to items.


def built_item(kind: str, arguments: str) -> Item | None:
    """Returns the members of the item of a built-in tool, beside its id, call id and status; None
    where the arguments are not such a tool's."""
    try:
        values = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    return _BUILT[kind](values)


def _strings(value: object) -> list[str] | None:
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return value
    return None


def _number(values: Item, name: str) -> int | None:
    value = values.get(name)
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def _local_shell_call(values: Item) -> Item | None:
    command = _strings(values.get("command"))
    if command is None:
        return None
    env = values.get("env")
    env = {str(name): str(value) for name, value in env.items()} if isinstance(env, dict) else {}
    action: Item = {"type": "exec", "command": command, "env": env}
    if (timeout_ms := _number(values, "timeout_ms")) is not None:
        action["timeout_ms"] = timeout_ms
    if isinstance(directory := values.get("working_directory"), str):
        action["working_directory"] = directory
    return {"type": "local_shell_call", "action": action}


def _shell_call(values: Item) -> Item | None:
    commands = _strings(values.get("commands"))
    if commands is None:
        return None
    action: Item = {"commands": commands}
    for name in ("timeout_ms", "max_output_length"):
        action[name] = _number(values, name)
    return {"type": "shell_call", "action": action, "environment": {"type": "local"}}


def _apply_patch_call(values: Item) -> Item | None:
    kind, path, diff = (values.get(name) for name in ("type", "path", "diff"))
    if not isinstance(path, str):
        return None
    if kind == "delete_file":
        operation = {"type": kind, "path": path}
    elif kind in ("create_file", "update_file") and isinstance(diff, str):
        operation = {"type": kind, "path": path, "diff": diff}
    else:
        return None
    return {"type": "apply_patch_call", "operation": operation}


_BUILT: Mapping[str, Callable[[Item], Item | None]] = {
    LOCAL_SHELL: _local_shell_call,
    SHELL: _shell_call,
    APPLY_PATCH: _apply_patch_call,
    TOOL_SEARCH: lambda values: {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": values,
    },
}
BUILT_IN = frozenset(_BUILT)


# The input of a custom tool, out of the JSON text of the arguments.

_OPENING = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_MAX_OPENING_CHARS = 256
_PIECE = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[0-9a-cefA-CEF]|\\u[dD][0-7])"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
    r"|\\(?![u\"\\/bfnrt])[\s\S]"  # no escape of JSON's: as the model wrote it
)
_MAX_ESCAPE_CHARS = 12  # of a pair of surrogates


class CustomInput:
    """Decodes the input while the arguments arrive; its pieces do not depend on how they are cut,
    but for where.

    Arguments that do not begin with the input are read when they are whole: those with one string
    are that string, and any others are the input as they stand.
    """

    def __init__(self) -> None:
        self._before = ""  # until the input begins
        self._held = ""  # the start of an escape
        self._is_within = False
        self._is_other = False  # does not begin with the input
        self._has_ended = False
        self._parts: list[str] = []  # of other arguments

    def add(self, text: str) -> str:
        """Returns what this piece of the arguments adds to the input."""
        if self._has_ended:
            return ""
        if self._is_within:
            return self._decoded(text)
        self._parts.append(text)
        if self._is_other:
            return ""
        self._before += text
        found = _OPENING.match(self._before)
        if found is None:
            self._is_other = len(self._before) > _MAX_OPENING_CHARS
            return ""
        self._is_within = True
        return self._decoded(self._before[found.end() :])

    def end(self) -> str:
        """Returns the rest of the input, once the arguments have ended."""
        if self._has_ended:
            return ""
        self._has_ended = True
        if self._is_within:
            return ""  # an escape that was cut off stands for nothing
        text = "".join(self._parts)
        try:
            values = msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(values, dict):
            strings = [value for value in values.values() if isinstance(value, str)]
            if isinstance(values.get(INPUT), str):
                return str(values[INPUT])
            if len(strings) == len(values) == 1:
                return strings[0]
        return values if isinstance(values, str) else text

    def _decoded(self, text: str) -> str:
        text, self._held = self._held + text, ""
        decoded, index = [], 0
        while index < len(text):
            piece = _PIECE.match(text, index)
            if piece is not None:
                decoded.append(_unescaped(piece[0]))
                index = piece.end()
            elif text[index] == '"':
                self._has_ended = True
                break
            elif len(text) - index < _MAX_ESCAPE_CHARS:
                self._held = text[index:]
                break
            else:  # no escape after all
                decoded.append(text[index])
                index += 1
        return "".join(decoded)


def _unescaped(piece: str) -> str:
    if piece[0] != "\\" or piece[1] not in 'u"\\/bfnrt':
        return piece
    return (
        str(json.loads(f'"{piece}"')).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )
