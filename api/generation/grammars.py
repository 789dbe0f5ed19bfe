"""Grammars of an output: of its structure, as requested, and of a whole turn around it.

Those of a turn (reasoning, calls of tools, the output) are in llguidance's kind of Lark. Calls are
written in the style in which models were trained to write them, so that a grammar seldom has
anything to forbid: one space behind colons and commas, no other white space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from api.errors import MAX_ECHO_CHARS
from api.generation.models import ServedModel
from api.generation.protocol import CompletionFields, ResponseFormat, StructuredOutputs
from api.generation.tools import Tool, ToolUse, arguments_schema
from api.output_parsers.formats import (
    HERMES_CLOSE,
    HERMES_OPEN,
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
)
from api.output_parsers.parser import Thinking
from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from shared.text.json_schema import grammar_schema
from shared.text.tool_formats import ToolFormat

NOT_SERVED = "structured_output_not_supported"


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
        raise InvalidParameter(
            requested.param, "this model's answers cannot be kept to a structure", NOT_SERVED
        )
    model.text.grammars.check(requested.grammar, requested.param)


def checked_grammar(model: ServedModel, request: CompletionFields) -> Grammar | None:
    """Returns the grammar of a request, compiled. Raises InvalidParameter."""
    requested = requested_grammar(request)
    if requested is None:
        return None
    check_grammar(model, requested)
    return requested.grammar


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

TokenId = Callable[[str], int | None]  # of a vocabulary's entry, by its exact name

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"(.|\n)*"
_LINE_BREAK = '"\\n"'
_ANSWER = "answer"
_ANY_TOKEN = "<[*]>"


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """What may stand before the answer; `budget`: at most so many tokens of it between markers."""

    thinking: Thinking
    budget: int | None = None

    @property
    def is_bound(self) -> bool:
        return self.budget is not None and self.thinking is not Thinking.NO


def can_bound(token_id: TokenId) -> bool:
    """Returns whether a budget can be kept: the markers are tokens and can be forced."""
    return token_id(THINK_OPEN) is not None and token_id(THINK_CLOSE) is not None


def tool_grammar(
    use: ToolUse,
    form: ToolFormat,
    reasoning: ReasoningRule,
    token_id: TokenId,
    answer: Grammar | None = None,
) -> Grammar:
    """Returns the grammar of text without calls but those that `use` allows, behind any reasoning.

    Each has the name of a callable tool, and arguments that its schema allows. Where the model must
    call, the text is calls alone. Else it is calls alone or an `answer`, or, where any answer will
    do, text with calls in it; what begins as a call does is one. Raises
    InvalidParameter for the schema of a strict tool, and for "grammar" when it is too long.
    """
    writer = _Writer(token_id)
    write = _CALL_GRAMMARS[form]
    if use.must_call or answer is None:
        return writer.grammar(reasoning, write(writer, use, alone=use.must_call))
    calls = write(writer, use, alone=True)
    return writer.grammar(reasoning, f"{calls} | {writer.answer(answer)}")


def answer_grammar(answer: Grammar, reasoning: ReasoningRule, token_id: TokenId) -> Grammar:
    """Returns the grammar `answer` for the text that follows the reasoning."""
    if reasoning.thinking is Thinking.NO:
        return answer
    writer = _Writer(token_id)
    return writer.grammar(reasoning, writer.answer(answer))


def any_grammar(reasoning: ReasoningRule, token_id: TokenId) -> Grammar:
    """Returns the grammar of reasoning within its budget, and then any tokens.

    Without reasoning at its start the text has no opening marker anywhere.
    """
    assert reasoning.is_bound, "else nothing is to be kept"
    writer = _Writer(token_id)
    if reasoning.thinking is Thinking.OPEN:
        return writer.grammar(reasoning, f"{_ANY_TOKEN}*")
    opening = token_id(THINK_OPEN)
    thought = f"/[ \\t\\r\\n]*/ <[{opening}]> {writer.reasoning(reasoning)} {_ANY_TOKEN}*"
    return writer.grammar(ReasoningRule(Thinking.NO), f"{thought} | <[^{opening}]>*")


def _hermes(writer: _Writer, use: ToolUse, *, alone: bool) -> str:
    body = f"{_LINE_BREAK} {writer.calls(use, 'arguments')} {_LINE_BREAK} "
    rest = writer.rule("call", body + writer.marker(HERMES_CLOSE))
    if alone:
        call = f"{writer.marker(HERMES_OPEN)} {rest}"
        return f"{call} ({_LINE_BREAK} {call})*" if use.parallel else call
    repeat = "*" if use.parallel else "?"
    call = f"{writer.up_to(HERMES_OPEN)} {rest}"
    return f"({call}){repeat} {writer.without(HERMES_OPEN)}"


def _llama3_json(writer: _Writer, use: ToolUse, *, alone: bool) -> str:
    """Returns the grammar of one call per turn, as the template has it."""
    calls = writer.calls(use, "parameters")
    if alone:
        return calls
    tag = writer.token(PYTHON_TAG)
    other = writer.rule("OTHER", r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/")
    return f"{other} | {calls}" if tag is None else f"{other} | {tag}? {calls}"


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        self._answer: str | None = None  # a grammar of its own

    def grammar(self, reasoning: ReasoningRule, body: str) -> Grammar:
        """Returns the grammar. `body`: what follows the reasoning; a choice in it binds last."""
        first = self._first(reasoning)
        rules = {"start": f"{first} ({body})" if first else body, **self._rules}
        text = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if self._answer is not None:
            parts = [{"lark_grammar": text}, {"name": _ANSWER, "lark_grammar": self._answer}]
            text = json.dumps({"grammars": parts})
        return Grammar(GrammarKind.LARK, text)

    def answer(self, answer: Grammar) -> str:
        """Returns the name under which it is part of this grammar."""
        if answer.kind is GrammarKind.LARK:
            self._answer = answer.text
            return f"@{_ANSWER}"
        if answer.kind is GrammarKind.REGEX:
            return self.rule("ANSWER", f"/{answer.text}/")
        return self.rule("answer", f"%json {answer.text}")

    def rule(self, name: str, body: str) -> str:
        """Returns its name; an upper case one is for what is one expression to the lexer."""
        self._rules[name] = body
        return name

    def token(self, text: str) -> str | None:
        """Returns a token by its number, which matches whether it is special or not."""
        token_id = self._token_id(text)
        return None if token_id is None else f"<[{token_id}]>"

    def marker(self, text: str) -> str:
        return self.token(text) or json.dumps(text)

    def without(self, marker: str) -> str:
        """Returns any text in which the marker does not occur, not even spelled out."""
        having = f"/{_ANYTHING}{_escaped(marker)}{_ANYTHING}/"
        return self.rule(f"NO_{_plain(marker)}", f"/{_ANYTHING}/ & ~{having}")

    def up_to(self, marker: str) -> str:
        """Returns any text, and then the marker for the first time."""
        token = self.token(marker)
        if token is not None:
            return f"{self.without(marker)} {token}"
        name = f"up_to_{_plain(marker).lower()}"
        self.rule(f"{name}[lazy]", f"/{_ANYTHING}{_escaped(marker)}/")
        return name

    def calls(self, use: ToolUse, arguments: str) -> str:
        """Returns the object of a call of one of the tools."""
        names = [
            self.rule(f"tool_{index}", _call(tool, arguments))
            for index, tool in enumerate(use.callable)
        ]
        return self.rule("tool", " | ".join(names))

    def reasoning(self, rule: ReasoningRule) -> str:
        """Returns the text from behind the opening marker to behind the closing one."""
        if rule.budget is None:
            return self.rule("reasoning", rf"{self.up_to(THINK_CLOSE)} /\n{{0,2}}/")
        self.rule(f"thoughts[max_tokens={rule.budget}]", self.without(THINK_CLOSE))
        return self.rule("reasoning", rf"thoughts {self.marker(THINK_CLOSE)} /\n{{0,2}}/")

    def _first(self, rule: ReasoningRule) -> str | None:
        if rule.thinking is Thinking.NO:
            return None
        rest = self.reasoning(rule)
        return rest if rule.thinking is Thinking.OPEN else f"({self.marker(THINK_OPEN)} {rest})?"


def _call(tool: Tool, arguments: str) -> str:
    before = json.dumps(f'{{"name": "{tool.name}", "{arguments}": ')
    return f'{before} %json {json.dumps(_schema(tool))} "}}"'


def _schema(tool: Tool) -> dict[str, Any]:
    """Returns the arguments' schema. What cannot be enforced is refused by name for a strict tool,
    and left out where it is not."""
    is_lenient = not tool.strict
    schema = arguments_schema(tool.parameters)
    walked = grammar_schema(schema, tool.schema_param, lenient=is_lenient)
    return {**walked, "x-guidance": {**_STYLE, "lenient": is_lenient}}


def _escaped(marker: str) -> str:
    return marker.replace("/", "\\/")


def _plain(marker: str) -> str:
    return "".join(char.upper() if char.isalpha() else "_" for char in marker).strip("_")


_CALL_GRAMMARS = {ToolFormat.HERMES: _hermes, ToolFormat.LLAMA3_JSON: _llama3_json}
