"""Prompts that end within the assistant's own turn, whose text the answer continues."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from api.generation.models import ServedModel
from api.generation.prompt import chat_text
from api.output_parsers.parser import Thinking
from shared.messages import InvalidParameter
from shared.text.special_text import MarkedText
from shared.text.tool_formats import REASONING_MARKERS, ReasoningFormat


def continued_text(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_name: str = "",
) -> MarkedText:
    """Returns the conversation through the model's template, up to where its last message ends.

    Raises InvalidParameter where that is not an assistant's text, or the template does not show it.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or not last_text(messages):
        raise InvalidParameter(
            "messages", "only a last message of an assistant's text is continued"
        )
    mark = f"q{secrets.token_hex(8)}q"  # where the text ends: in no message and no template
    marked = {**last, "content": _followed_by(last["content"], mark)}
    text = chat_text(
        model,
        [*messages[:-1], marked],
        extra,
        tools=tools,
        add_generation_prompt=False,
        template_name=template_name,
    )
    before, found, _ = text.text.rpartition(mark)
    if not found:
        raise InvalidParameter("messages", "this model's chat template hides the last message")
    return MarkedText(before, text.mark)


def thinking_within(
    messages: Sequence[Mapping[str, Any]], reasoning_format: ReasoningFormat | None
) -> Thinking:
    """Returns whether the text that is continued has opened its reasoning and not closed it."""
    if reasoning_format is None:
        return Thinking.NO
    text = last_text(messages)
    opening, closing = REASONING_MARKERS[reasoning_format]
    is_open = max(map(text.rfind, opening)) > max(map(text.rfind, closing))
    return Thinking.OPEN if is_open else Thinking.NO


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of the last message; of one in parts, that of its last part."""
    content = messages[-1]["content"] if messages else ""
    return content if isinstance(content, str) else str(content[-1]["text"])


def _followed_by(content: str | list[Mapping[str, Any]], mark: str) -> Any:
    if isinstance(content, str):
        return content + mark
    *before, last = content
    return [*before, {**last, "text": last["text"] + mark}]
