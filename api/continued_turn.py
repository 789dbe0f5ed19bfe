"""Prompts that end within the assistant's own turn, whose text the answer continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.catalog import ServedModel
from api.prompts import chat_text
from api.turn.formats import THINK_CLOSE, THINK_OPEN
from api.turn.reading import Thinking
from shared.messages import InvalidParameter
from shared.text.turn_formats import ReasoningFormat

_MARK = "qzxjjxzq"  # where the text ends; in no template's own text


def continued_text(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the conversation through the model's template, up to where its last message ends.

    Raises InvalidParameter where that is not an assistant's text, or the template does not show it.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or not last_text(messages):
        raise InvalidParameter(
            "messages", "only a last message of an assistant's text is continued"
        )
    mark = _MARK
    while mark in last_text(messages):
        mark += _MARK
    marked = {**last, "content": _followed_by(last["content"], mark)}
    text = chat_text(
        model, [*messages[:-1], marked], extra, tools=tools, add_generation_prompt=False
    )
    before, found, _ = text.rpartition(mark)
    if not found:
        raise InvalidParameter("messages", "this model's chat template hides the last message")
    return before


def thinking_within(
    messages: Sequence[Mapping[str, Any]], reasoning_format: ReasoningFormat | None
) -> Thinking:
    """Whether the text that is continued has opened its reasoning and not closed it."""
    text = last_text(messages)
    is_open = text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)
    return Thinking.OPEN if is_open and reasoning_format is not None else Thinking.NO


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message; of one in parts, that of its last part."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        content = content[-1].get("text")
    return content if isinstance(content, str) else ""


def _followed_by(content: str | list[Mapping[str, Any]], mark: str) -> Any:
    if isinstance(content, str):
        return content + mark
    *before, last = content
    return [*before, {**last, "text": last["text"] + mark}]
