"""Prepares prompts: text and conversations to token ids, a grammar and parsers of the output.

Chat completions, Responses and Messages each make a ChatInput of a request. CPU-bound: run it in
the thread pool, but for what `is_short_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.errors import unsupported
from api.generation.conversation import (
    NO_CALLS,
    NO_TOOLS,
    NO_TOOLS_CODE,
    chat_text,
    continued_text,
    thinking_within,
)
from api.generation.models import ServedModel
from api.generation.protocol import NO_PROMPT, CompletionFields
from api.generation.tools import ToolUse
from api.http.shares import paying_tenant
from api.ids import random_seed
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

QUICK_CHARS = 512
QUICK_IDS = 8192

TOOL_SCHEMAS = "tools.function.parameters"  # by chat's name

Prompt = str | Sequence[str | int | list[int]]


def check_text_fits(model: ServedModel, text: str, param: str) -> None:
    """Refuses a text that is far too long before it is tokenized. Raises InvalidParameter."""
    least = model.text.tokenizer.least_tokens(text)
    if least > model.context_tokens:
        model.budget(least).check_prompt(param, is_least=True)


def chat_token_ids(
    model: ServedModel, text: MarkedText, add_special_tokens: bool = False
) -> tuple[int, ...]:
    """Returns the tokens of a rendered template, special ones included. Raises InvalidParameter."""
    return _encoded(model, text, "messages", add_special_tokens)


def prompt_token_ids(
    model: ServedModel,
    prompt: Prompt,
    add_special_tokens: bool = True,
    *,
    must_fit: bool = True,
) -> tuple[int, ...]:
    """Returns the ids of text, token ids, or a list of one of these. `must_fit`: into the context.

    Raises InvalidParameter.
    """
    parts = each_prompt(prompt)
    if len(parts) > 1:
        raise unsupported("prompt", "here a request has one prompt")
    param, part = parts[0]
    if must_fit and isinstance(part, str):
        check_text_fits(model, part, param)
    return _token_ids(model, part, param, add_special_tokens)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model sees it, and as text."""

    param: str  # the member it came in
    token_ids: tuple[int, ...]
    text: str  # "" for token ids whose text is not needed


def encoded_prompts(
    model: ServedModel, prompt: Prompt, with_text: bool
) -> tuple[EncodedPrompt, ...]:
    """Returns one prompt or a list of them encoded, in order; `with_text`: token ids are also
    decoded to text. Raises InvalidParameter."""
    encoded = []
    for param, part in each_prompt(prompt):
        if isinstance(part, str):
            check_text_fits(model, part, param)
        token_ids = _token_ids(model, part, param, add_special_tokens=True)
        text = part if isinstance(part, str) else ""
        if with_text and not isinstance(part, str):
            text = model.text.tokenizer.decode(token_ids)
        encoded.append(EncodedPrompt(param, token_ids, text))
    return tuple(encoded)


def is_short_prompt(model: ServedModel, prompt: Prompt) -> bool:
    """Returns whether it is read faster than a thread would be reached: one short text, or token
    ids, which are only compared."""
    if isinstance(prompt, str):
        return len(prompt) <= QUICK_CHARS and model.text.is_local
    return len(prompt) <= QUICK_IDS and all(isinstance(part, int) for part in prompt)


def each_prompt(prompt: Prompt) -> tuple[tuple[str, str | list[int]], ...]:
    """Returns the prompts of `prompt`, each with its parameter's name. Raises
    InvalidParameter."""
    if isinstance(prompt, str):
        return (("prompt", prompt),)
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    token_ids = [part for part in prompt if isinstance(part, int)]
    if len(token_ids) == len(prompt):
        return (("prompt", token_ids),)
    parts = tuple(part for part in prompt if not isinstance(part, int))
    if token_ids or len({type(part) for part in parts}) > 1:
        raise InvalidParameter("prompt", NO_PROMPT)
    return tuple((f"prompt.{index}", part) for index, part in enumerate(parts))


def checked_token_ids(model: ServedModel, token_ids: Sequence[Any], param: str) -> tuple[int, ...]:
    """Raises InvalidParameter for an id that the model does not have."""
    highest = model.card.vocab_size - 1
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= highest:
        raise InvalidParameter(param, f"token ids are between 0 and {highest}")
    return tuple(token_ids)


def _token_ids(
    model: ServedModel, prompt: str | list[int], param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encoded(model, MarkedText(prompt), param, add_special_tokens)
    return checked_token_ids(model, prompt, param)


def _encoded(
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
    """Returns what the output must match, or None for any text.

    CPU-bound for large schemas: run it in the thread pool. Raises InvalidParameter, also where the
    request has several.
    """
    if not request.is_structured:
        return None
    found: RequestedGrammar | None = load_part("grammars").only_grammar(request)
    return found


def checked_grammar(model: ServedModel, request: CompletionFields) -> Grammar | None:
    """Returns the grammar of a request, compiled. Raises InvalidParameter."""
    requested = requested_grammar(request)
    if requested is None:
        return None
    load_part("grammars").check_grammar(model, requested)
    return requested.grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A chat request of any dialect.

    `messages` are as templates know them (`api.generation.messages.template_messages`).
    `call_id_seed`: what the ids of tool calls are made from, where the same response may be sent
    several times; "" for ids of their own each time. `continues`: the last message is an
    assistant's, whose text the output continues. `thinking_budget`: at most so many tokens of
    reasoning, where the model's output can be kept to that (see grammars.can_bound).
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
    """The prompt, what the output must match, and a parser for each choice's text.

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
        thinking = thinking_within(chat.messages, reasoning_format)
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
        new_parser=OutputParserFactory(config, chat.call_id_seed or random_seed()),
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
        return continued_text(
            model,
            chat.messages,
            variables,
            tools=definitions,
            template_name=chat.chat_template,
        )
    return chat_text(
        model,
        chat.messages,
        variables,
        tools=definitions,
        add_generation_prompt=chat.add_generation_prompt,
        template_name=chat.chat_template,
    )
