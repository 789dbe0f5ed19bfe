"""The conversation of a chat request: checked, and brought to the form that templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import MAX_ECHO_CHARS, unsupported
from shared.messages import InvalidParameter

# OpenAI's newer name for the system role; chat templates know only the older.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOOL_ROLES = frozenset({"tool", "function"})
MAX_MESSAGES = 10_000


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """role, content (text, or text parts) and name of each message. Raises InvalidParameter.

    Members that the SDKs send empty (`tool_calls: null`, `annotations: []`) count as absent.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParameter("messages", f"must have 1 to {MAX_MESSAGES} entries")
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    present = {name: value for name, value in message.items() if value is not None and value != []}
    role = present.pop("role", None)
    if role is None:
        name = f"{path}.role"
        raise InvalidParameter(
            name, f"Missing required parameter: '{name}'.", "missing_required_parameter"
        )
    if isinstance(role, str) and role in TOOL_ROLES:
        raise unsupported(f"{path}.role", "tool calls are not served for now")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    checked: dict[str, Any] = {"role": ROLES[role], "content": _content(message, present, path)}
    present.pop("content", None)
    if "name" in present:
        name = present.pop("name")
        if not isinstance(name, str):
            raise InvalidParameter(f"{path}.name", "must be a string")
        checked["name"] = name
    for other in present:
        raise unsupported(f"{path}.{other[:MAX_ECHO_CHARS]}", "it is not known here")
    return checked


def _content(message: Mapping[str, Any], present: Mapping[str, Any], path: str) -> Any:
    content = present.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        name = f"{path}.content"
        if message.get("content") == []:
            raise InvalidParameter(name, "must not be an empty list")
        raise InvalidParameter(
            name, f"Missing required parameter: '{name}'.", "missing_required_parameter"
        )
    if not isinstance(content, list):
        raise InvalidParameter(f"{path}.content", "must be a string or a list of text parts")
    return [_part(part, f"{path}.content.{index}") for index, part in enumerate(content)]


def _part(part: object, path: str) -> dict[str, str]:
    if not isinstance(part, dict):
        raise InvalidParameter(path, "must be an object")
    if part.get("type") != "text":
        kind = str(part.get("type"))[:MAX_ECHO_CHARS]
        raise unsupported(f"{path}.type", f"parts of type '{kind}' are not served, only 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameter(f"{path}.text", "must be a string")
    for other in part:
        if other not in ("type", "text"):
            raise unsupported(f"{path}.{other[:MAX_ECHO_CHARS]}", "it is not known here")
    return {"type": "text", "text": text}
