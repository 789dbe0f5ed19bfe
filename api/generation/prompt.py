"""Prepares prompts: text and conversations to token ids, a grammar and parsers of the output.

Chat completions, Responses and Messages each make a ChatInput of a request. CPU-bound: run it in
the thread pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.generation.models import ServedModel
from api.generation.protocol import CompletionFields
from api.generation.tools import ToolUse
from api.http.shares import paying_tenant
from api.on_demand import load_part
from api.output_parsers.parser import (
    OutputParserFactory,
    ParserConfig,
    Types,
    thinking_after,
)
from shared.messages import Grammar, InvalidParameter
from shared.text.special_text import MarkedText
from shared.text.tool_formats import (
    UNTYPED_FORMATS,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)

NO_TOOLS = "This model's chat template has no tools in a known format."
NO_CALLS = "This model calls tools in an unknown format, so it cannot be forced to call one."
NO_TOOLS_CODE = "tools_not_supported"
NO_TEMPLATE = (
    "This model has no chat template: it serves completions, or chat once PENSTOCK_CHAT_TEMPLATE "
    "names a template for its worker."
)
NO_TEMPLATE_CODE = "chat_not_supported"

TOOL_SCHEMAS = "tools.function.parameters"  # by chat's name


def check_text_fits(model: ServedModel, text: str, param: str) -> None:
    """Refuses a text that is far too long before it is tokenized. Raises InvalidParameter."""
    least = model.text.tokenizer.least_tokens(text)
    if least > model.context_tokens:
        model.budget(least).check_prompt(param, is_least=True)


def chat_token_ids(
    model: ServedModel, text: MarkedText, add_special_tokens: bool = False
) -> tuple[int, ...]:
    """Returns the tokens of a rendered template, special ones included. Raises InvalidParameter."""
    return encoded(model, text, "messages", add_special_tokens)


def encoded(
    model: ServedModel, text: MarkedText, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    try:
        return tuple(
            model.text.tokenizer.encode(
                text.text,
                add_special_tokens=add_special_tokens,
                mark=text.mark,
                tenant=paying_tenant(),
            )
        )
    except InvalidParameter as error:
        raise InvalidParameter(param, error.message, error.code) from None


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the parameter that requests it, for errors."""

    grammar: Grammar
    param: str


def requested_grammar(request: CompletionFields) -> RequestedGrammar | None:
    """Returns the grammar that the output must match, or None for any text.

    CPU-bound for large schemas: run it in the thread pool. Raises InvalidParameter, also where the
    request has several.
    """
    if not request.is_structured:
        return None
    found: RequestedGrammar | None = load_part("grammars").only_grammar(request)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A chat request of any dialect.

    `messages` are as templates know them (`api.generation.messages.template_messages`).
    `call_id_seed`: seeds the ids of tool calls where the same response may be sent several times;
    "" for new ids each time. `continues`: the last message is an
    assistant's, whose text the output continues. `thinking_budget`: the most tokens of reasoning,
    where the model's output can be kept to that (see grammars.can_bound).
    """

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse = field(default_factory=ToolUse)
    output: RequestedGrammar | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    call_id_seed: str = ""
    add_generation_prompt: bool = True
    continues: bool = False
    chat_template: str = ""  # the name of one of the model's
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt, the grammar of the output, and a parser for each choice's text.

    `counts_reasoning`: the text may have reasoning, so that its tokens are counted. `ignored`: for
    `ignored_parameters.report_ignored`.
    """

    token_ids: tuple[int, ...]
    grammar: Grammar | None
    new_parser: OutputParserFactory
    counts_reasoning: bool = False
    ignored: tuple[str, ...] = ()  # parameters without effect, by chat's names


def prepare_prompt(model: ServedModel, chat: ChatInput, *, must_fit: bool = True) -> PreparedPrompt:
    """Returns the prompt of a request. `must_fit`: it must fit into the model's context.

    CPU-bound: run it in the thread pool. Raises InvalidParameter.
    """
    use = chat.tool_use
    tool_format = tool_format_of(model.card.tool_format)
    if use.tools and tool_format is None:
        raise InvalidParameter("tools", NO_TOOLS, NO_TOOLS_CODE)
    if use.must_call and tool_format is ToolFormat.TEXT:
        raise InvalidParameter("tool_choice", NO_CALLS, NO_TOOLS_CODE)
    definitions = [tool.definition() for tool in use.tools]
    variables, ignores_effort = dict(chat.chat_template_kwargs), False
    if chat.reasoning_effort is not None:
        variables, ignores_effort = load_part("efforts").with_effort(
            model, chat.reasoning_effort, variables
        )
    text = _prompt(model, chat, variables, definitions or None)
    if must_fit:
        check_text_fits(model, text.plain, "messages")
    reasoning_format = reasoning_format_of(model.card.reasoning_format)
    if chat.continues:
        thinking = load_part("continued").thinking_within(chat.messages, reasoning_format)
    else:
        thinking = thinking_after(text.plain, reasoning_format)
    config = ParserConfig(
        tool_format=tool_format,
        names=tuple(tool.name for tool in use.callable),
        types=_types(use, tool_format),
        reasoning_format=reasoning_format,
        thinking=thinking,
    )
    grammar: Grammar | None = None
    unenforced: Sequence[str] = ()
    if chat.output is not None or use.is_enforced or chat.thinking_budget is not None:
        grammar, unenforced = load_part("grammars").turn_grammar(model, chat, tool_format, thinking)
    return PreparedPrompt(
        token_ids=chat_token_ids(model, text),
        grammar=grammar,
        new_parser=OutputParserFactory(config, chat.call_id_seed),
        counts_reasoning=reasoning_format is not None,
        ignored=(*(("reasoning_effort",) if ignores_effort else ()), *unenforced),
    )


def _types(use: ToolUse, tool_format: ToolFormat | None) -> dict[str, dict[str, Types]]:
    """Returns the types of the tools' parameters, for formats that do not write them."""
    if tool_format not in UNTYPED_FORMATS:
        return {}
    return {tool.name: load_part("parameters").parameter_types(tool) for tool in use.callable}


def _prompt(
    model: ServedModel,
    chat: ChatInput,
    variables: Mapping[str, Any],
    definitions: Sequence[Mapping[str, Any]] | None,
) -> MarkedText:
    if chat.continues:
        text: MarkedText = load_part("continued").continued_text(
            model,
            chat.messages,
            variables,
            tools=definitions,
            template_name=chat.chat_template,
        )
        return text
    return chat_text(
        model,
        chat.messages,
        variables,
        tools=definitions,
        add_generation_prompt=chat.add_generation_prompt,
        template_name=chat.chat_template,
    )


# A conversation through the chat template of the model.


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
