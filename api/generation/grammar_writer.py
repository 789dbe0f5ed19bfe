"""GrammarWriter: writes the rules of one grammar, in llguidance's kind of Lark.

Calls are written in the style in which models were trained to write them, so that a grammar seldom
has anything to forbid: one space after colons and commas, no other white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.generation.parameters import arguments_schema
from api.generation.tools import Tool
from api.output_parsers.harmony import ANALYSIS, CHANNEL, CONSTRAIN, END, FINAL, MESSAGE, START
from api.output_parsers.parser import Thinking
from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text.compilable_schema import fault_in
from shared.text.json_schema import enforceable_schema, grammar_schema
from shared.text.tool_formats import DSML, REASONING_MARKERS, ReasoningFormat

TokenId = Callable[[str], int | None]  # of a vocabulary's entry, by its exact name

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"(.|\n)*"
_ANSWER = "answer"
_MARKUP = re.compile(r"(<[^<>]+>)")
_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/")  # of regular expressions


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """The reasoning before the answer; `budget`: its most tokens between the markers."""

    thinking: Thinking
    budget: int | None = None
    reasoning_format: ReasoningFormat = ReasoningFormat.THINK

    @property
    def is_bound(self) -> bool:
        return self.budget is not None and self.thinking is not Thinking.NO

    @property
    def opening(self) -> str:
        return REASONING_MARKERS[self.reasoning_format][0][0]

    @property
    def closing(self) -> str:
        return REASONING_MARKERS[self.reasoning_format][1][0]


class GrammarWriter:
    """Writes the rules of one grammar."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        self._answer: str | None = None  # a grammar of its own

    def grammar(self, reasoning: ReasoningRule, body: str) -> Grammar:
        """Returns the grammar. `body` follows the reasoning; a choice in it binds last."""
        first = self._first(reasoning)
        rules = {"start": f"{first} ({body})" if first else body, **self._rules}
        text = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if self._answer is not None:
            parts = [{"lark_grammar": text}, {"name": _ANSWER, "lark_grammar": self._answer}]
            text = json.dumps({"grammars": parts})
        return Grammar(GrammarKind.LARK, text)

    def answer(self, answer: Grammar, reasoning: ReasoningRule) -> str:
        """Returns the rule of the answer after any reasoning."""
        name = self._answered(answer)
        if reasoning.reasoning_format is ReasoningFormat.OPENAI and reasoning.thinking in (
            Thinking.MAYBE,
            Thinking.OPEN,
        ):
            kind = f'(/ ?/ {self.marker(CONSTRAIN)} "json")?'
            return f"{self.marker(CHANNEL)} {quoted(FINAL)} {kind} {self.marker(MESSAGE)} {name}"
        return name

    def _answered(self, answer: Grammar) -> str:
        """Returns the name under which a grammar is part of this one."""
        if answer.kind is GrammarKind.LARK:
            self._answer = answer.text
            return f"@{_ANSWER}"
        if answer.kind is GrammarKind.REGEX:
            return self.rule("ANSWER", f"/{answer.text}/")
        return self.rule("answer", f"%json {answer.text}")

    def rule(self, name: str, body: str) -> str:
        """Returns its name, in upper case for a terminal of the lexer."""
        self._rules[name] = body
        return name

    def has_token(self, text: str) -> bool:
        """Returns whether the vocabulary has it as one entry."""
        return self._token_id(text) is not None

    def token(self, text: str) -> str | None:
        """Returns a token by its number, which matches whether it is special or not."""
        token_id = self._token_id(text)
        return None if token_id is None else f"<[{token_id}]>"

    def marker(self, text: str) -> str:
        """Returns the rule of a marker: its token, or its text where it is no token."""
        whole = self.token(text)
        if whole is not None:
            return whole
        parts = [part for part in _MARKUP.split(text) if part]
        return " ".join(self.token(part) or self._spelled(part) for part in parts)

    def _spelled(self, text: str) -> str:
        """Returns the text in letters, but for the token that DeepSeek's tags have in them."""
        token = self.token(DSML)
        if token is None:
            return quoted(text)
        return f" {token} ".join(quoted(part) if part else "" for part in text.split(DSML))

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

    def matching_up_to(self, pattern: str, marker: str, *, line_break: bool) -> str:
        """Returns a text that an expression matches, and the marker after it for the first time.
        `line_break`: on a line of its own before it."""
        number, token = len(self._rules), self.token(marker)
        text, closing = pattern + (r"\n" if line_break else ""), _escaped(marker)
        if token is not None:
            having = f"/{_ANYTHING}{closing}{_ANYTHING}/"
            return f"{self.rule(f'KEPT_{number}', f'/{text}/ & ~{having}')} {token}"
        too_late = rf"/{_ANYTHING}{closing}(.|\n)+/"
        kept = self.rule(f"KEPT_{number}", f"/{text}{closing}/ & ~{too_late}")
        self.rule(f"kept_{number}[lazy]", kept)
        return f"kept_{number}"

    def with_text(self, opening: str, rest: str, *, is_repeated: bool) -> str:
        """Returns any text with calls in it: each the marker `opening` and `rest` after it."""
        call = f"{self.up_to(opening)} {rest}"
        return f"({call}){'*' if is_repeated else '?'} {self.without(opening)}"

    def reasoning(self, rule: ReasoningRule) -> str:
        """Returns the text from after the opening marker to after the closing one."""
        if rule.budget is None:
            return self.rule("reasoning", rf"{self.up_to(rule.closing)} /\n{{0,2}}/")
        self.rule(f"thoughts[max_tokens={rule.budget}]", self.without(rule.closing))
        return self.rule("reasoning", rf"thoughts {self.marker(rule.closing)} /\n{{0,2}}/")

    def harmony_message(self, header: str) -> str:
        """Returns a message of harmony's, and the beginning of the next one's header."""
        ending = f'{self.marker(END)} {self.marker(START)} "assistant"'
        return f"{header} {self.without(END)} {ending}"

    def _harmony_first(self, rule: ReasoningRule) -> str:
        analysis = self.rule("analysis", self.harmony_message(self.harmony_header(ANALYSIS)))
        rest = self.harmony_message("") if rule.thinking is Thinking.OPEN else ""
        return f"{rest} {analysis}*"

    def harmony_header(self, channel: str) -> str:
        return f"{self.marker(CHANNEL)} {quoted(channel)} {self.marker(MESSAGE)}"

    def _first(self, rule: ReasoningRule) -> str | None:
        if rule.thinking is Thinking.NO:
            return None
        if rule.reasoning_format is ReasoningFormat.OPENAI:
            return self._harmony_first(rule)
        rest = self.reasoning(rule)
        return rest if rule.thinking is Thinking.OPEN else f"({self.marker(rule.opening)} {rest})?"


def arguments(tool: Tool) -> str:
    """Returns the JSON of a call's arguments. Raises InvalidParameter for a schema."""
    return f"%json {json.dumps(_schema(tool))}"


def quoted(text: str) -> str:
    """Returns the literal of this text."""
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Tool) -> dict[str, Any]:
    """Returns the arguments' schema. Keywords that cannot be enforced are refused by name for a
    strict tool, and left out for others."""
    schema = arguments_schema(tool.parameters)
    return styled(schema, tool)


def styled(schema: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Returns a schema of a tool's, with the style that models write. One of a tool that is not
    strict is enforced as far as it can be. Raises InvalidParameter for that of a strict one."""
    if not tool.strict:
        return {**enforceable_schema(schema), "x-guidance": {**_STYLE, "lenient": True}}
    try:
        walked = grammar_schema(schema, tool.schema_param)
    except InvalidParameter as error:
        raise InvalidParameter(error.param, f"tool {tool.name!r}: {error.message}") from error
    fault = fault_in(walked)
    if fault is not None:
        raise InvalidParameter(tool.schema_param, f"tool {tool.name!r}: {fault}")
    return {**walked, "x-guidance": {**_STYLE, "lenient": False}}


def _escaped(marker: str) -> str:
    return "".join(f"\\{char}" if char in _SIGNS else char for char in marker)


def _plain(marker: str) -> str:
    return "".join(char.upper() if char.isalpha() else "_" for char in marker).strip("_")
