"""ChatPlan: a conversation, its tools and its output format, made ready for any chat dialect.

Every dialect (chat completions, responses, messages) brings its request to the members of a
ChatAsk, which are those of OpenAI's chat completions, and gets back what a job needs and how to
read the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.catalog import ServedModel
from api.prompts import chat_token_ids
from api.turn.parser import NewParser, PlainParser
from shared.messages import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """What is asked, in the members of POST /v1/chat/completions, unchecked."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt, what the output must match, and a parser for each choice's text."""

    token_ids: tuple[int, ...]
    grammar: Grammar | None
    new_parser: NewParser


def plan_chat(model: ServedModel, ask: ChatAsk) -> ChatPlan:
    """Takes its time: call it on a thread of the TextPool. Raises InvalidParameter."""
    token_ids = chat_token_ids(model, ask.messages, ask.chat_template_kwargs)
    return ChatPlan(token_ids, None, PlainParser)
