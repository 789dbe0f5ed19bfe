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
    """Returns a card's format; None also for one of a newer release."""
    return ToolFormat(name) if name in set(ToolFormat) else None


def reasoning_format_of(name: str | None) -> ReasoningFormat | None:
    """Returns a card's format; None also for one of a newer release."""
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
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: "x"}}}
    ],
}
_USER = {"role": "user", "content": "probe"}
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "ok"}
_WRITTEN = {
    ToolFormat.HERMES: re.compile(
        rf'<tool_call>\s*\{{(?=[^<]*"name":\s*"{_NAME}")(?=[^<]*"arguments":\s*\{{\s*"{_KEY}")'
    ),
    ToolFormat.LLAMA3_JSON: re.compile(
        rf'(?<!<tool_call>)\{{\s*"name":\s*"{_NAME}",\s*"parameters":\s*\{{\s*"{_KEY}"'
    ),
}


def markers(tool_format: str | None, reasoning_format: str | None) -> tuple[str, ...]:
    """Returns the texts that frame calls and reasoning; the output's text shows them also where
    they are special tokens."""
    return _MARKERS.get(tool_format or "", ()) + _MARKERS.get(reasoning_format or "", ())


def shows_tools(template: ChatTemplate) -> bool:
    """Returns whether the tools of a request reach the prompt."""
    return _NAME in _rendered(template, [_USER], [_TOOL])


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """Returns the format in which the template writes earlier calls; None for an unknown one, and
    for a template without tools. The model was trained on what its template writes."""
    if not shows_tools(template):
        return None
    for tools in ([_TOOL], None):
        text = _rendered(template, [_USER, _CALL, _RESULT], tools)
        for tool_format, written in _WRITTEN.items():
            if written.search(text):
                return tool_format
    return None


def find_reasoning_format(sources: Mapping[str, str]) -> ReasoningFormat | None:
    """Returns the format whose markers one of the templates (`sources`, by name) writes, or cuts
    out of the assistant's messages: its model may write them."""
    found = any("</think>" in source for source in sources.values())
    return ReasoningFormat.THINK if found else None


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """Returns '' where the template refuses."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=False)
    except InvalidParameter:
        return ""
