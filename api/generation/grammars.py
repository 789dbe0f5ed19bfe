"""Grammars of an output: of its structure, as requested, and of a whole turn around it.

Those of a turn (reasoning, calls of tools, the output) are in llguidance's kind of Lark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from api.errors import MAX_ECHO_CHARS
from api.generation.call_grammars import CALL_GRAMMARS
from api.generation.grammar_writer import GrammarWriter, ReasoningRule, TokenId
from api.generation.models import ServedModel
from api.generation.prompt import TOOL_SCHEMAS, ChatInput, RequestedGrammar
from api.generation.protocol import CompletionFields, ResponseFormat, StructuredOutputs
from api.generation.tools import ToolUse
from api.output_parsers.parser import Thinking
from shared.messages import Grammar, InvalidParameter
from shared.text.grammar import (
    MAX_RULES,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from shared.text.tool_formats import (
    REASONING_MARKERS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
)

NOT_SERVED = "structured_output_not_supported"


def only_grammar(request: CompletionFields) -> RequestedGrammar | None:
    """Returns the grammar of the output, or None for any text. Raises InvalidParameter, also where
    the request has several."""
    requested: RequestedGrammar | None = None
    for found in _requested_grammars(request):
        if requested is not None:
            name, first = (one.param.partition(".")[0] for one in (found, requested))
            raise InvalidParameter(name, f"cannot be combined with '{first}'")
        requested = found
    return requested


def check_grammar(model: ServedModel, requested: RequestedGrammar) -> None:
    """Compiles a grammar for the model. CPU-bound: run it in the thread pool.

    Raises InvalidParameter where the model's output cannot be kept to it.
    """
    if not model.card.structured_output:
        reason = model.card.structured_output_reason
        why = f": {reason}" if reason else ""
        raise InvalidParameter(
            requested.param, f"this model's answers cannot be kept to a structure{why}", NOT_SERVED
        )
    model.text.grammars.check(requested.grammar, requested.param)


def object_output(param: str) -> RequestedGrammar:
    """Returns the grammar of any JSON object."""
    return RequestedGrammar(json_object_grammar(), param)


def schema_output(schema: dict[str, Any] | bool | None, param: str) -> RequestedGrammar:
    """Returns the grammar of a JSON schema, strict or not. Raises InvalidParameter."""
    return RequestedGrammar(json_schema_grammar({} if schema is None else schema, param), param)


def _requested_grammars(request: CompletionFields) -> Iterator[RequestedGrammar]:
    found = _of_format(request.response_format)
    if found is not None:
        yield found
    for name, make in _MAKERS.items():
        param = f"guided_{name}"
        value = getattr(request, param)
        if value is not None:
            yield RequestedGrammar(make(value, param), param)
    if request.structured_outputs is not None:
        yield _of_structured(request.structured_outputs)


def _of_format(response_format: ResponseFormat | None) -> RequestedGrammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return object_output("response_format")
    schema = response_format.json_schema.json_schema
    return schema_output(schema, "response_format.json_schema.schema")


def _of_structured(structured: StructuredOutputs) -> RequestedGrammar:
    param = "structured_outputs"
    values = structured.model_dump(by_alias=True, exclude_none=True)
    is_object = values.pop("json_object", False)
    if len(values) + is_object != 1:
        names = ", ".join([*_MAKERS, "json_object"])
        raise InvalidParameter(param, f"must have one of {names}")
    if is_object:
        return object_output(f"{param}.json_object")
    ((name, value),) = values.items()
    return RequestedGrammar(_MAKERS[name](value, f"{param}.{name}"), f"{param}.{name}")


def _guided_json(value: dict[str, Any] | str | bool, param: str) -> Grammar:
    """Returns the grammar of a schema, or of one as JSON text."""
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(param, f"is not JSON: {str(error)[:MAX_ECHO_CHARS]}") from None
    return json_schema_grammar(schema, param)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _guided_json,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}


# Grammars of a whole turn.

_ANY_TOKEN = "<[*]>"


def can_bound(
    token_id: TokenId, reasoning_format: ReasoningFormat | None = ReasoningFormat.THINK
) -> bool:
    """Returns whether a budget can be kept: the markers are tokens and can be forced."""
    if reasoning_format is None:
        return False
    opening, closing = REASONING_MARKERS[reasoning_format]
    return token_id(opening[0]) is not None and token_id(closing[0]) is not None


def tool_grammar(
    use: ToolUse,
    form: ToolFormat,
    reasoning: ReasoningRule,
    token_id: TokenId,
    answer: Grammar | None = None,
) -> Grammar:
    """Returns the grammar of text without calls but those that `use` allows, after any reasoning.

    Each has the name of a callable tool, and arguments that its schema allows. Where the model must
    call, the text is calls alone. Else it is calls alone or an `answer`, or, where any answer will
    do, text with calls in it; text that starts like a call must be one. Raises
    InvalidParameter for the schema of a strict tool, and for "grammar" when it is too long.
    """
    writer = GrammarWriter(token_id)
    write = CALL_GRAMMARS[form]
    if use.must_call or answer is None:
        return writer.grammar(reasoning, write(writer, use, alone=use.must_call))
    calls = write(writer, use, alone=True)
    return writer.grammar(reasoning, f"{calls} | {writer.answer(answer, reasoning)}")


def answer_grammar(answer: Grammar, reasoning: ReasoningRule, token_id: TokenId) -> Grammar:
    """Returns the grammar `answer` for the text that follows the reasoning."""
    if reasoning.thinking is Thinking.NO:
        return answer
    writer = GrammarWriter(token_id)
    return writer.grammar(reasoning, writer.answer(answer, reasoning))


def any_grammar(reasoning: ReasoningRule, token_id: TokenId) -> Grammar:
    """Returns the grammar of reasoning within its budget, and then any tokens.

    Without reasoning at its start the text has no opening marker anywhere.
    """
    assert reasoning.is_bound, "else nothing is to be kept"
    writer = GrammarWriter(token_id)
    if reasoning.thinking is Thinking.OPEN:
        return writer.grammar(reasoning, f"{_ANY_TOKEN}*")
    opening = token_id(reasoning.opening)
    thought = f"/[ \\t\\r\\n]*/ <[{opening}]> {writer.reasoning(reasoning)} {_ANY_TOKEN}*"
    return writer.grammar(ReasoningRule(Thinking.NO), f"{thought} | <[^{opening}]>*")


def turn_grammar(
    model: ServedModel, chat: ChatInput, tool_format: ToolFormat | None, thinking: Thinking
) -> tuple[Grammar | None, Sequence[str]]:
    """Returns the grammar of a turn, and the parameters that it does not enforce.

    CPU-bound: run it in the thread pool. Raises InvalidParameter.
    """
    reasoning = _reasoning(model, chat, thinking)
    return _grammar(model, chat.tool_use, tool_format, reasoning, chat.output)


def _reasoning(model: ServedModel, chat: ChatInput, thinking: Thinking) -> ReasoningRule:
    """Returns the reasoning format, without a budget where the output cannot be kept to it."""
    reasoning_format = reasoning_format_of(model.card.reasoning_format)
    if reasoning_format is None:
        return ReasoningRule(Thinking.NO)
    token_id = model.text.tokenizer.token_id
    is_bound = model.card.structured_output and can_bound(token_id, reasoning_format)
    budget = chat.thinking_budget if is_bound else None
    return ReasoningRule(thinking, budget, reasoning_format)


def _grammar(
    model: ServedModel,
    use: ToolUse,
    tool_format: ToolFormat | None,
    reasoning: ReasoningRule,
    answer: RequestedGrammar | None,
) -> tuple[Grammar | None, Sequence[str]]:
    """Returns the grammar of the turn, and the parameters that it does not enforce. Calls stay
    possible beside a structured response.

    The schemas of tools that are not strict are left out where with them the grammar is too large
    or too complex: the choice among a thousand tools holds, and a call has any arguments.
    """
    if answer is not None:
        check_grammar(model, answer)
    has_calls = use.is_enforced or (answer is not None and bool(use.callable))
    if not has_calls or tool_format is ToolFormat.TEXT:  # its calls are text, never wrong
        return _grammar_without_calls(model, reasoning, answer), ()
    assert tool_format is not None, "there are no tools without a format"
    is_strict = any(tool.strict for tool in use.callable)
    if is_strict or len(use.callable) < MAX_RULES:  # each tool is a rule at least
        try:
            return _grammar_of_calls(model, use, tool_format, reasoning, answer), ()
        except InvalidParameter:
            if is_strict:
                raise
    use = replace(use, any_arguments=True)
    return _grammar_of_calls(model, use, tool_format, reasoning, answer), (TOOL_SCHEMAS,)


def _grammar_of_calls(
    model: ServedModel,
    use: ToolUse,
    tool_format: ToolFormat,
    reasoning: ReasoningRule,
    answer: RequestedGrammar | None,
) -> Grammar:
    only = None if answer is None else answer.grammar
    try:
        turn = tool_grammar(use, tool_format, reasoning, model.text.tokenizer.token_id, only)
    except InvalidParameter as error:
        raise _too_large(error, "tools") from None
    check_grammar(model, RequestedGrammar(turn, "tools"))
    return turn


def _grammar_without_calls(
    model: ServedModel, reasoning: ReasoningRule, answer: RequestedGrammar | None
) -> Grammar | None:
    token_id = model.text.tokenizer.token_id
    param = "thinking_token_budget" if answer is None else answer.param
    try:
        if answer is not None:
            turn = answer_grammar(answer.grammar, reasoning, token_id)
        elif reasoning.is_bound:
            turn = any_grammar(reasoning, token_id)
        else:
            return None
    except InvalidParameter as error:
        raise _too_large(error, param) from None
    check_grammar(model, RequestedGrammar(turn, param))
    return turn


def _too_large(error: InvalidParameter, param: str) -> InvalidParameter:
    """Returns the error of a grammar of a turn: its own, or that it is too long."""
    if error.param != "grammar":
        return error
    return InvalidParameter(param, "with everything around it, it is too large")
