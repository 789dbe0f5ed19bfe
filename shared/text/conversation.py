"""A conversation as chat templates expect it, from messages as API clients send them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shared.messages import InvalidParameter

MAX_MESSAGES = 10_000

_REASONING_MEMBERS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ContentForm(Enum):
    """How a template takes a message's content."""

    TEXT = "text"  # a string only
    PARTS = "parts"  # a list of parts only
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template was found to understand by rendering probes."""

    content: Mapping[str, ContentForm] = field(default_factory=dict)  # by role; others: TEXT
    arguments_as_text: bool = False  # tool call arguments stay the JSON text they arrive as


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> list[dict[str, Any]]:
    """Fresh top-level dictionaries; the caller's are not touched.

    Members that are None are dropped, and reasoning is given under each of its names, both as
    transformers does it. Content becomes what the template takes: text parts are joined by a
    newline where it takes a string only. Tool call arguments that are the JSON text of an object
    become that object (or the other way round, where the template wants text); text that is no
    object is a model's slip and left as it is. Raises InvalidParameter("messages", ...).
    """
    if not messages:
        raise InvalidParameter("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter("messages", f"at most {MAX_MESSAGES} messages")
    return [_prepare(message, index, traits) for index, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], index: int, traits: TemplateTraits) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"message {index} must be an object")
    if not isinstance(message.get("role"), str):
        raise InvalidParameter("messages", f"message {index} must have a role")
    prepared = {name: value for name, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING_MEMBERS if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if "content" in prepared:
        form = traits.content.get(message["role"], ContentForm.TEXT)
        prepared["content"] = _content(prepared["content"], index, form)
    if "tool_calls" in prepared:
        prepared["tool_calls"] = _tool_calls(prepared["tool_calls"], index, traits)
    return prepared


def _content(content: Any, index: int, form: ContentForm) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form is ContentForm.PARTS else content
    if not isinstance(content, list | tuple):
        raise InvalidParameter("messages", f"content of message {index} must be text or parts")
    texts = [_part_text(part, index) for part in content]
    if form is ContentForm.TEXT:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, index: int) -> str:
    if not isinstance(part, Mapping):
        raise InvalidParameter("messages", f"content parts of message {index} must be objects")
    kind = part.get("type")
    member = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if member is None:
        raise InvalidParameter(
            "messages", f"content part {kind!r:.60} of message {index} is not supported: only text"
        )
    text = part.get(member)
    if not isinstance(text, str):
        raise InvalidParameter("messages", f"a text part of message {index} has no text")
    return text


def _tool_calls(calls: Any, index: int, traits: TemplateTraits) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise InvalidParameter("messages", f"tool_calls of message {index} must be a list")
    prepared = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise InvalidParameter("messages", f"tool_calls of message {index} must be objects")
        function = call.get("function")
        if isinstance(function, Mapping) and "arguments" in function:
            arguments = _arguments(function["arguments"], as_text=traits.arguments_as_text)
            call = {**call, "function": {**function, "arguments": arguments}}
        prepared.append(dict(call))
    return prepared


def _arguments(arguments: Any, *, as_text: bool) -> Any:
    if as_text:
        if isinstance(arguments, str):
            return arguments
        try:
            return json.dumps(arguments, ensure_ascii=False)
        except RecursionError as error:
            raise InvalidParameter("messages", "tool call arguments nest too deeply") from error
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
