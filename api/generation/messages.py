"""The conversation of a chat request: checked, and brought to the form that templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import MAX_ECHO_CHARS, missing_parameter, unknown_parameter, unsupported
from shared.messages import InvalidParameter

# OpenAI's newer name for the system role; chat templates know only the older.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # content parts and calls of all messages of a request together
MAX_CALLS = 128  # in one message

_REASONING = ("reasoning_content", "reasoning")  # one thing under the two names in use


class PartCount:
    """Counts the parts of a conversation, in any dialect. `param` is the member that has them."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._count = 0

    def add(self, value: object, *members: str) -> None:
        """Adds the parts in the lists that an object has under these names.

        Raises InvalidParameter when there are more than MAX_PARTS.
        """
        if not isinstance(value, Mapping):
            return
        for member in members:
            parts = value.get(member)
            if isinstance(parts, list):
                self._count += len(parts)
        if self._count > MAX_PARTS:
            raise InvalidParameter(
                self._param, f"must have at most {MAX_PARTS} content parts and calls in all"
            )


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """role, content (text, or text parts), name, and what only some roles have, of each message.

    Members that the SDKs send empty (`refusal: null`, `annotations: []`) count as absent. Raises
    InvalidParameter.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParameter("messages", f"must have 1 to {MAX_MESSAGES} entries")
    count = PartCount("messages")
    for message in messages:
        count.add(message, "content", "tool_calls")
    called: dict[str, str] = {}  # id of a call -> name of its tool
    return [
        _message(message, f"messages.{index}", called) for index, message in enumerate(messages)
    ]


def _message(message: Mapping[str, Any], path: str, called: dict[str, str]) -> dict[str, Any]:
    present = {name: value for name, value in message.items() if value is not None and value != []}
    role = _role(present.pop("role", None), path)
    own: dict[str, Any] = {}
    if role == "assistant":
        own = _of_assistant(present, path, called)
    elif role == "tool":
        own = _of_tool(present, path, called)
    if "name" in present:
        own["name"] = _string(present.pop("name"), f"{path}.name")
    if "content" in present or "content" not in own:
        own["content"] = _content(message.get("content"), f"{path}.content", role)
    present.pop("content", None)
    _nothing_else(present, path)
    return {"role": role, "content": own.pop("content"), **own}


def _role(role: object, path: str) -> str:
    if role is None:
        raise missing_parameter(f"{path}.role")
    if role == "function":
        raise unsupported(f"{path}.role", "it is deprecated, use 'tool'")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    return ROLES[role]


def _of_assistant(present: dict[str, Any], path: str, called: dict[str, str]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name in _REASONING:
        if name in present:
            checked["reasoning_content"] = _string(present.pop(name), f"{path}.{name}")
    if "function_call" in present:
        raise unsupported(f"{path}.function_call", "it is deprecated, use 'tool_calls'")
    if "tool_calls" in present:
        checked["tool_calls"] = _calls(present.pop("tool_calls"), f"{path}.tool_calls", called)
        checked["content"] = ""  # some templates look at it without asking whether it is there
    if "refusal" in present:
        refusal = _string(present.pop("refusal"), f"{path}.refusal")
        if "content" not in present:
            checked["content"] = refusal
    present.pop("parsed", None)
    return checked


def _calls(calls: object, path: str, called: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidParameter(path, f"must be a list of at most {MAX_CALLS} calls")
    checked = []
    own: set[str] = set()
    for index, call in enumerate(calls):
        at = f"{path}.{index}"
        if not isinstance(call, dict):
            raise InvalidParameter(at, "must be an object")
        rest = {name: value for name, value in call.items() if value is not None}
        if rest.pop("type", "function") != "function":
            raise unsupported(f"{at}.type", "only calls of type 'function' are known")
        call_id = _string(rest.pop("id", None), f"{at}.id")
        if call_id in own:
            raise InvalidParameter(f"{at}.id", "is the id of another call of this message")
        own.add(call_id)
        rest.pop("index", None)  # where the call came in a stream
        name, arguments = _function(rest.pop("function", None), f"{at}.function")
        _nothing_else(rest, at)
        called[call_id] = name
        function = {"name": name, "arguments": arguments}
        checked.append({"id": call_id, "type": "function", "function": function})
    return checked


def _function(function: object, path: str) -> tuple[str, str]:
    if function is None:
        raise missing_parameter(path)
    if not isinstance(function, dict):
        raise InvalidParameter(path, "must be an object")
    name = _string(function.get("name"), f"{path}.name")
    arguments = _string(function.get("arguments"), f"{path}.arguments")
    known = {"name", "arguments", "parsed_arguments"}
    _nothing_else({name: None for name in function if name not in known}, path)
    return name, arguments


def _of_tool(present: dict[str, Any], path: str, called: dict[str, str]) -> dict[str, Any]:
    at = f"{path}.tool_call_id"
    call_id = _string(present.pop("tool_call_id", None), at)
    if call_id not in called:
        raise InvalidParameter(at, "is not the id of a call in an earlier assistant message")
    return {"tool_call_id": call_id, "name": called[call_id]}


def _content(content: object, path: str, role: str) -> Any:
    if isinstance(content, str):
        return content
    if content is None:
        raise missing_parameter(path)
    if content == []:
        raise InvalidParameter(path, "must not be an empty list")
    if not isinstance(content, list):
        raise InvalidParameter(path, "must be a string or a list of text parts")
    kinds = {"text": "text", "refusal": "refusal"} if role == "assistant" else {"text": "text"}
    return [_part(part, f"{path}.{index}", kinds) for index, part in enumerate(content)]


def _part(part: object, path: str, kinds: Mapping[str, str]) -> dict[str, str]:
    """A text part; `kinds`: type of a part -> its member that has the text."""
    if not isinstance(part, dict):
        raise InvalidParameter(path, "must be an object")
    kind = part.get("type")
    member = kinds.get(kind) if isinstance(kind, str) else None
    if member is None:
        echoed = str(kind)[:MAX_ECHO_CHARS]
        raise unsupported(f"{path}.type", f"parts of type '{echoed}' are not served, only 'text'")
    text = part.get(member)
    if not isinstance(text, str):
        raise InvalidParameter(f"{path}.{member}", "must be a string")
    _nothing_else({name: None for name in part if name not in ("type", member)}, path)
    return {"type": "text", "text": text}


def _string(value: object, path: str) -> str:
    if value is None:
        raise missing_parameter(path)
    if not isinstance(value, str):
        raise InvalidParameter(path, "must be a string")
    return value


def _nothing_else(rest: Mapping[str, Any], path: str) -> None:
    for name in rest:
        raise unknown_parameter(f"{path}.{name!s}")
