"""Values of arguments that are written as bare text: their JSON, by the types of the schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from api.output_parsers.json_scanner import JsonScanner
from api.output_parsers.literals import PYTHON, LiteralConverter
from api.output_parsers.parser import Types

TEXT_ONLY: Types = ("string",)
NO_TEXT: Types = ("array", "boolean", "integer", "null", "number", "object")
_BRACKETS = {"[": "array", "(": "array", "{": "object"}
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def json_of(text: str, types: Types) -> str:
    """Returns the JSON of a value: as it stands where it is JSON of such a type, converted where it
    is a Python literal of a list or dictionary that is declared, else a string."""
    written = text.strip()
    kind = _kind(written)
    if kind is not None and _is_among(kind, types):
        return sendable(written)
    word = _WORDS.get(written.lower())
    if word in types and "string" not in types:  # as Python writes them
        return "null" if word == "null" else written.lower()
    literal = _literal(written, types) if kind is None else None
    if literal is not None and literal.is_done:
        return sendable(literal.json)
    return sendable(json.dumps(text, ensure_ascii=False))


def begun_json(text: str, types: Types) -> str:
    """Returns the JSON of a value that breaks off, broken off too."""
    converted = json_of(text, types)
    if not converted.startswith('"'):
        return converted
    written = text.strip()
    if not types or "string" in types:
        return converted[:-1]
    scanner = JsonScanner()
    scanner.scan(written)
    literal = _literal(written, types) if scanner.is_broken else None
    return written if literal is None else sendable(literal.json)


@dataclass(frozen=True, slots=True)
class _Literal:
    json: str
    is_done: bool  # else it breaks off


def _literal(written: str, types: Types) -> _Literal | None:
    """Converts a list, tuple or dictionary as Python writes them; None for anything else."""
    if _BRACKETS.get(written[:1]) not in types:
        return None
    converter = LiteralConverter(PYTHON)
    end, converted = converter.convert(written, has_ended=True)
    if converter.is_broken or (converter.is_done and end < len(written)):
        return None
    return _Literal(converted, converter.is_done)


def sendable(written: str) -> str:
    """Returns a JSON text with each half of a surrogate pair escaped: UTF-8 cannot carry one."""
    return written.encode(errors="backslashreplace").decode()


def _is_among(kind: str, types: Types) -> bool:
    if not types:
        return kind != "string"
    if kind == "whole number":
        return "integer" in types or "number" in types
    return kind in types and kind != "string"


def _kind(written: str) -> str | None:
    """Returns the type of a JSON text; None for other text."""
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _type_of(value)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "whole number" if value == value // 1 else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _refuse(word: str) -> None:
    raise ValueError(word)
