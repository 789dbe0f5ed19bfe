"""Grammars in llguidance's Lark, looked at before its compiler does: what is in them and how much.

The compiler's own limits count what it has understood; those here bound what it has to read. With
them the slowest grammars that were found take half a second to compile and a tenth for a mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shared.text.errors import GrammarInvalid

MAX_RULES = 300  # definitions in one grammar
MAX_LARK_CHARS = 32_768  # of one grammar, the JSON schemas in it left out
MAX_INTERSECTIONS = 16  # `&` between expressions: each may multiply the states of the lexer

Schema = dict[str, Any] | bool

_SCHEMA_FOLLOWS = re.compile(r"%json\s*")
_DEFINITION = re.compile(r"[A-Za-z_][\w-]*(?:\[[^\]\n]*\])?[ \t]*:")
_OPTION = re.compile(r"[A-Za-z_][\w-]*\[[^\]\n]*?\b(temperature|stop)[ \t]*=")
_decoder = json.JSONDecoder()


def lark_parts(text: str) -> Iterator[str | Schema]:
    """The text in order: what is Lark as strings, the schemas behind each `%json` decoded.

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
    """`lark`: a grammar without its schemas. Raises GrammarInvalid."""
    if len(lark) > MAX_LARK_CHARS:
        raise GrammarInvalid(
            f"the grammar has more than {MAX_LARK_CHARS} characters outside of JSON schemas"
        )
    if sum(1 for _ in _DEFINITION.finditer(lark)) > MAX_RULES:
        raise GrammarInvalid(f"the grammar has more than {MAX_RULES} rules")
    if lark.count("&") > MAX_INTERSECTIONS:
        raise GrammarInvalid(f"the grammar has more than {MAX_INTERSECTIONS} times '&' in it")


def check_lark_options(lark: str) -> None:
    """Options of rules that would ask for more than the choice of tokens. Raises GrammarInvalid."""
    option = _OPTION.search(lark)
    if option is not None:
        raise GrammarInvalid(f"the option {option[1]!r} of a rule is not supported")
