"""Prepares the prompt of a conversation, its grammar and the parsers of its output, in any dialect.

Chat completions, Responses and Messages each make a ChatInput of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.errors import unsupported
from api.generation.models import ServedModel
from api.generation.prompt import (
    NO_TOOLS,
    NO_TOOLS_CODE,
    chat_text,
    chat_token_ids,
    check_text_fits,
)
from api.generation.structured_output import RequestedGrammar, check_grammar
from api.generation.tools import ToolUse
from api.generation.turn_grammar import (
    ReasoningRule,
    answer_grammar,
    any_grammar,
    can_bound,
    tool_grammar,
)
from api.ids import random_seed
from api.output_parsers.factory import OutputParserFactory, Thinking, thinking_after
from api.output_parsers.formats import THINK_CLOSE, THINK_OPEN
from shared.messages import Grammar, InvalidParameter
from shared.text.tool_formats import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A chat request of any dialect.

    `messages` are as templates know them (`api.generation.messages.template_messages`).
    `call_id_seed`: what the ids of tool calls are made from, where the same response may be sent
    several times; "" for ids of their own each time. `continues`: the last message is an
    assistant's, whose text the output continues. `thinking_budget`: at most so many tokens of
    reasoning, where the model's output can be kept to that (see turn_grammar.can_bound).
    """

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse = field(default_factory=ToolUse)
    output: RequestedGrammar | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    call_id_seed: str = ""
    add_generation_prompt: bool = True
    continues: bool = False
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt, what the output must match, and a parser for each choice's text.

    `counts_reasoning`: the text may have reasoning, so that its tokens are counted.
    """

    token_ids: tuple[int, ...]
    grammar: Grammar | None
    new_parser: OutputParserFactory
    counts_reasoning: bool = False


def prepare_prompt(model: ServedModel, chat: ChatInput, *, must_fit: bool = True) -> PreparedPrompt:
    """Returns the prompt of a request. `must_fit`: it must fit into the model's context.

    CPU-bound: run it in the thread pool. Raises InvalidParameter.
    """
    use = chat.tool_use
    tool_format = tool_format_of(model.card.tool_format)
    if use.tools and tool_format is None:
        raise InvalidParameter("tools", NO_TOOLS, NO_TOOLS_CODE)
    definitions = [tool.definition() for tool in use.tools]
    text = _prompt(model, chat, definitions or None)
    if must_fit:
        check_text_fits(model, text, "messages")
    reasoning_format = reasoning_format_of(model.card.reasoning_format)
    if chat.continues:
        thinking = thinking_within(chat.messages, reasoning_format)
    else:
        thinking = thinking_after(text, reasoning_format)
    reading = OutputParserFactory(
        tool_format=tool_format,
        names=frozenset(tool.name for tool in use.callable),
        reasoning_format=reasoning_format,
        thinking=thinking,
        seed=chat.call_id_seed or random_seed(),
    )
    return PreparedPrompt(
        token_ids=chat_token_ids(model, text),
        grammar=_grammar(model, use, tool_format, _reasoning(model, chat, thinking), chat.output),
        new_parser=reading,
        counts_reasoning=reasoning_format is not None,
    )


def _prompt(
    model: ServedModel, chat: ChatInput, definitions: Sequence[Mapping[str, Any]] | None
) -> str:
    variables = _variables(model, chat)
    if chat.continues:
        return continued_text(model, chat.messages, variables, tools=definitions)
    return chat_text(
        model,
        chat.messages,
        variables,
        tools=definitions,
        add_generation_prompt=chat.add_generation_prompt,
    )


def _reasoning(model: ServedModel, chat: ChatInput, thinking: Thinking) -> ReasoningRule:
    """A budget that the model's output cannot be kept to is none."""
    is_bound = model.card.structured_output and can_bound(model.text.tokenizer.token_id)
    return ReasoningRule(thinking, chat.thinking_budget if is_bound else None)


def _variables(model: ServedModel, chat: ChatInput) -> dict[str, Any]:
    """What the template is given beside messages and tools."""
    variables = dict(chat.chat_template_kwargs)
    effort = chat.reasoning_effort
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise InvalidParameter("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    template = model.text.chat_template
    known = frozenset() if template is None else template.variables
    if "reasoning_effort" in known:
        variables["reasoning_effort"] = effort
    elif effort == "none" and "enable_thinking" in known:
        variables["enable_thinking"] = False
    else:
        why = "can only be 'none'" if "enable_thinking" in known else "cannot be set"
        raise unsupported("reasoning_effort", f"this model's effort {why}")
    return variables


def _grammar(
    model: ServedModel,
    use: ToolUse,
    tool_format: ToolFormat | None,
    reasoning: ReasoningRule,
    answer: RequestedGrammar | None,
) -> Grammar | None:
    """Of the whole turn. Calls that a model may make stay possible beside a structured answer."""
    if answer is not None:
        check_grammar(model, answer)
    has_calls = use.is_enforced or (answer is not None and bool(use.callable))
    param = "tools" if has_calls else "thinking_token_budget" if answer is None else answer.param
    token_id = model.text.tokenizer.token_id
    try:
        if has_calls:
            assert tool_format is not None, "there are no tools without a format"
            only = None if answer is None else answer.grammar
            turn = tool_grammar(use, tool_format, reasoning, token_id, only)
        elif answer is not None:
            turn = answer_grammar(answer.grammar, reasoning, token_id)
        elif reasoning.is_bound:
            turn = any_grammar(reasoning, token_id)
        else:
            return None
    except InvalidParameter as error:
        if error.param != "grammar":
            raise
        raise InvalidParameter(param, "with everything around it, it is too large") from None
    check_grammar(model, RequestedGrammar(turn, param))
    return turn


# Prompts that end within the assistant's own turn, whose text the answer continues.

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
    content = messages[-1]["content"] if messages else ""
    return content if isinstance(content, str) else str(content[-1]["text"])


def _followed_by(content: str | list[Mapping[str, Any]], mark: str) -> Any:
    if isinstance(content, str):
        return content + mark
    *before, last = content
    return [*before, {**last, "text": last["text"] + mark}]
