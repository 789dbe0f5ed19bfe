"""Grammars as clients write them: every way becomes a Grammar here.

Purely textual. GrammarCompiler finds out whether a model's vocabulary can follow one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from shared.messages import MAX_GRAMMAR_CHARS, Grammar, GrammarKind, InvalidParameter
from shared.text.base import GrammarInvalid
from shared.text.json_schema import grammar_schema

MAX_REGEX_CHARS = 16_384
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 8_192

_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/")


def json_object_grammar() -> Grammar:
    """Returns the grammar of any JSON object."""
    return json_schema_grammar({"type": "object"}, "response_format")


def json_schema_grammar(schema: object, param: str) -> Grammar:
    """Returns the grammar of JSON that the schema finds valid. Raises InvalidParameter(param)."""
    text = json.dumps(grammar_schema(schema, param), ensure_ascii=False, separators=(",", ":"))
    return _grammar(GrammarKind.JSON_SCHEMA, text, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Returns the grammar of text that matches as a whole. Raises InvalidParameter(param).

    The syntax is that of Rust's regex crate: as everywhere, without looking around and back. `\\d`,
    `\\w` and `\\s` are ASCII's, as in JavaScript.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidParameter(param, f"must have 1 to {MAX_REGEX_CHARS} characters")
    return _grammar(GrammarKind.REGEX, regex_to_lark(_utf8(pattern, param), "dws"), param)


def whole_pattern(pattern: str) -> str | None:
    """Returns the expression of the whole texts that a JSON schema's pattern finds valid. None for
    one that is not `^(?:...)$`, or `^...$` without alternatives."""
    found = re.fullmatch(r"\^(?:\(\?:(.*)\)|([^|]*))(?<!\\)\$", pattern, re.DOTALL)
    if found is None:
        return None
    for inner in found.groups():
        # Valid on its own: its parentheses match, and it has no anchors.
        if inner is not None and len(inner) <= MAX_REGEX_CHARS:
            lark = regex_to_lark(inner, "dws")
            if not LLMatcher.validate_grammar(f"start: /{lark}/"):
                return f"(?:{lark})"
    return None


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Returns the grammar of exactly one of the texts. Raises InvalidParameter(param)."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidParameter(param, f"must be a list of 1 to {MAX_CHOICES} strings")
    if max(map(len, choices)) > MAX_CHOICE_CHARS:
        raise InvalidParameter(param, f"each text has at most {MAX_CHOICE_CHARS} characters")
    # One expression and not a rule with alternatives: it may have thousands.
    texts = (_escaped(choice) for choice in dict.fromkeys(choices))
    return _grammar(GrammarKind.REGEX, f"(?:{'|'.join(texts)})", param)


def lark_grammar(text: str, param: str) -> Grammar:
    """Returns a context-free grammar from llguidance's Lark or llama.cpp's GBNF (`root ::= ...`).

    The schema after a `%json` is read as json_schema_grammar does. Raises InvalidParameter(param).
    """
    try:
        if "::=" in text:
            text = _from_gbnf(text)
        return _grammar(GrammarKind.LARK, "".join(_lark(text, param)), param)
    except GrammarInvalid as error:
        raise InvalidParameter(param, str(error)) from error


def _lark(text: str, param: str) -> list[str]:
    parts = list(lark_parts(text))
    lark = "".join(part for part in parts if isinstance(part, str))
    check_lark_size(lark)
    check_lark_options(lark)
    return [
        part if isinstance(part, str) else json.dumps(grammar_schema(part, param)) for part in parts
    ]


def _from_gbnf(text: str) -> str:
    check_lark_size(text.replace("::=", ":"))  # converting takes time as well
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # its own is one of several that it raises
        raise GrammarInvalid(f"the grammar is not valid GBNF: {error}") from error


def _grammar(kind: GrammarKind, text: str, param: str) -> Grammar:
    if not 0 < len(text) <= MAX_GRAMMAR_CHARS:
        raise InvalidParameter(param, f"must have 1 to {MAX_GRAMMAR_CHARS} characters")
    return Grammar(kind, _utf8(text, param))


def _utf8(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            param, f"lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from error
    return text


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in _REGEX_SIGNS else char for char in text)


# Grammars in llguidance's Lark: their parts and size, checked before they are compiled.
#
# The compiler's own limits count parsed items; those here bound its input. With them the slowest
# grammars that were found take half a second to compile and a tenth for a mask.

MAX_RULES = 300  # definitions in one grammar
MAX_LARK_CHARS = 32_768  # of one grammar, the JSON schemas in it left out
MAX_INTERSECTIONS = 16  # `&` between expressions: each may multiply the states of the lexer

Schema = dict[str, Any] | bool

_SCHEMA_FOLLOWS = re.compile(r"%json\s*")
_DEFINITION = re.compile(r"[A-Za-z_][\w-]*(?:\[[^\]\n]*\])?[ \t]*:")
_OPTION = re.compile(r"[A-Za-z_][\w-]*\[[^\]\n]*?\b(temperature|stop)[ \t]*=")
_decoder = json.JSONDecoder()


def lark_parts(text: str) -> Iterator[str | Schema]:
    """Yields the text in order: Lark as strings, the schema after each `%json` decoded.

    Raises GrammarInvalid for a `%json` without a schema.
    """
    begin = 0
    while (found := _SCHEMA_FOLLOWS.search(text, begin)) is not None:
        yield text[begin : found.end()]
        try:
            schema, begin = _decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict | bool):
            raise GrammarInvalid("a JSON schema must follow each %json")
        yield schema
    yield text[begin:]


def check_lark_size(lark: str) -> None:
    """Checks a grammar, given without its schemas. Raises GrammarInvalid."""
    if len(lark) > MAX_LARK_CHARS:
        raise GrammarInvalid(
            f"the grammar has more than {MAX_LARK_CHARS} characters outside of JSON schemas"
        )
    if sum(1 for _ in _DEFINITION.finditer(lark)) > MAX_RULES:
        raise GrammarInvalid(f"the grammar has more than {MAX_RULES} rules")
    if lark.count("&") > MAX_INTERSECTIONS:
        raise GrammarInvalid(f"the grammar has more than {MAX_INTERSECTIONS} times '&' in it")


def check_lark_options(lark: str) -> None:
    """Refuses options of rules that do more than choose tokens. Raises GrammarInvalid."""
    option = _OPTION.search(lark)
    if option is not None:
        raise GrammarInvalid(f"the option {option[1]!r} of a rule is not supported")
