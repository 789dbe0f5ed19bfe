"""A conversation through the model's chat template, whole or up to where its last text ends."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from api.generation.models import ServedModel
from api.on_demand import load_part
from api.output_parsers.parser import Thinking
from shared.messages import InvalidParameter
from shared.text.special_text import MarkedText
from shared.text.tool_formats import REASONING_MARKERS, ReasoningFormat, tool_format_of

NO_TOOLS = "This model's chat template has no tools in a format that is known here."
NO_CALLS = "This model calls tools in a format that is not known here: it cannot be made to."
NO_TOOLS_CODE = "tools_not_supported"
NO_TEMPLATE = (
    "This model has no chat template: it serves completions, or chat once its worker is given a "
    "template with PENSTOCK_CHAT_TEMPLATE."
)
NO_TEMPLATE_CODE = "chat_not_supported"


def chat_text(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_name: str = "",
) -> MarkedText:
    """Returns the conversation through the model's template, special tokens in its messages marked.
    Raises InvalidParameter.

    Calls of tools in it are refused where the model is not known to have any: its template would
    leave them out.
    """
    template = model.text.chat_template
    if template is None:
        raise InvalidParameter("messages", NO_TEMPLATE, NO_TEMPLATE_CODE)
    if model.card.tool_format is None:
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                raise InvalidParameter(f"messages.{index}.tool_calls", NO_TOOLS, NO_TOOLS_CODE)
    mark = ""
    if model.text.special_texts is not None:
        messages, mark = model.text.special_texts.marked(messages)
    if any("tool_calls" in message or "tool_call_id" in message for message in messages):
        messages = load_part("history").history(messages, tool_format_of(model.card.tool_format))
    text = template.render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        extra=extra,
        name=template_name,
    )
    return MarkedText(text, mark)


# Prompts that end within the assistant's own turn, whose text the answer continues.


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
