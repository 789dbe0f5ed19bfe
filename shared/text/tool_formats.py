"""How a model writes calls of tools and its reasoning: named on its card, found in its template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from shared.messages import InvalidParameter
from shared.text.base import ChatTemplate


class ToolFormat(StrEnum):
    """Where a call of a tool stands in the text, and what it looks like."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}, from the first character on


class ReasoningFormat(StrEnum):
    """What marks the reasoning."""

    THINK = "think"  # <think> ... </think>, at the start of the text


def tool_format_of(name: str | None) -> ToolFormat | None:
    """A card's; None also for a format that a newer release has brought."""
    return ToolFormat(name) if name in set(ToolFormat) else None


def reasoning_format_of(name: str | None) -> ReasoningFormat | None:
    """A card's; None also for a format that a newer release has brought."""
    return ReasoningFormat(name) if name in set(ReasoningFormat) else None


_MARKERS: Mapping[str, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ReasoningFormat.THINK: ("<think>", "</think>"),
}

_NAME, _KEY = "qzxj", "jxzq"  # in no template's own text
_CALL_ID = "call00001"  # nine letters and digits: what Mistral's templates insist on
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_ASKING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: "x"}}}
    ],
}
_USER = {"role": "user", "content": "probe"}
_ANSWERING = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "ok"}
_WRITTEN = {
    ToolFormat.HERMES: re.compile(
        rf'<tool_call>\s*\{{(?=[^<]*"name":\s*"{_NAME}")(?=[^<]*"arguments":\s*\{{\s*"{_KEY}")'
    ),
    ToolFormat.LLAMA3_JSON: re.compile(
        rf'(?<!<tool_call>)\{{\s*"name":\s*"{_NAME}",\s*"parameters":\s*\{{\s*"{_KEY}"'
    ),
}


def markers(tool_format: str | None, reasoning_format: str | None) -> tuple[str, ...]:
    """The texts that frame calls and reasoning. Where they are special tokens of a vocabulary,
    the model's text shows them all the same."""
    return _MARKERS.get(tool_format or "", ()) + _MARKERS.get(reasoning_format or "", ())


def shows_tools(template: ChatTemplate) -> bool:
    """Whether the tools of a request reach the prompt."""
    return _NAME in _rendered(template, [_USER], [_TOOL])


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The format in which the template writes calls that were made; None for one that is not
    known, and for a template without tools. The model was trained on what its template writes."""
    if not shows_tools(template):
        return None
    for tools in ([_TOOL], None):
        text = _rendered(template, [_USER, _ASKING, _ANSWERING], tools)
        for tool_format, written in _WRITTEN.items():
            if written.search(text):
                return tool_format
    return None


def find_reasoning_format(sources: Mapping[str, str]) -> ReasoningFormat | None:
    """`sources`: the templates by name. One that writes the markers, or cuts them out of what an
    assistant said, belongs to a model that may write them."""
    found = any("</think>" in source for source in sources.values())
    return ReasoningFormat.THINK if found else None


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """'' where the template refuses."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=False)
    except InvalidParameter:
        return ""
