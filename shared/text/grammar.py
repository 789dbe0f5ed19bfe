"""Grammars as callers may ask for them: every way to write one becomes a Grammar here.

Purely textual. Whether a model's vocabulary can follow it is for a GrammarCompiler to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from shared.messages import MAX_GRAMMAR_CHARS, Grammar, GrammarKind, InvalidParameter
from shared.text.errors import GrammarInvalid
from shared.text.json_schema import grammar_schema
from shared.text.lark_text import check_lark_options, check_lark_size, lark_parts

MAX_REGEX_CHARS = 16_384
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 8_192

_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/")


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"}, "response_format")


def json_schema_grammar(schema: object, param: str) -> Grammar:
    """JSON that the schema finds valid. Raises InvalidParameter(param)."""
    text = json.dumps(grammar_schema(schema, param), ensure_ascii=False, separators=(",", ":"))
    return _grammar(GrammarKind.JSON_SCHEMA, text, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Text that matches from its first to its last character. Raises InvalidParameter(param).

    The syntax is that of Rust's regex crate: as everywhere, without looking around and back. `\\d`,
    `\\w` and `\\s` are ASCII's, as in JavaScript.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidParameter(param, f"must have 1 to {MAX_REGEX_CHARS} characters")
    return _grammar(GrammarKind.REGEX, regex_to_lark(_utf8(pattern, param), "dws"), param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Exactly one of the texts. Raises InvalidParameter(param)."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidParameter(param, f"must be a list of 1 to {MAX_CHOICES} strings")
    if max(map(len, choices)) > MAX_CHOICE_CHARS:
        raise InvalidParameter(param, f"each text has at most {MAX_CHOICE_CHARS} characters")
    # One expression and not a rule with alternatives: it may have thousands.
    texts = (_escaped(choice) for choice in dict.fromkeys(choices))
    return _grammar(GrammarKind.REGEX, f"(?:{'|'.join(texts)})", param)


def lark_grammar(text: str, param: str) -> Grammar:
    """A context-free grammar in llguidance's Lark, or in llama.cpp's GBNF (`root ::= ...`).

    The schema behind a `%json` is read as json_schema_grammar does. Raises InvalidParameter(param).
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
        raise GrammarInvalid(f"the grammar is no GBNF: {error}") from error


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
