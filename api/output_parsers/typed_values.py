"""Values of arguments that are written as bare text: their JSON, by the types of the schema."""

from __future__ import annotations

import json
from typing import Any

Types = tuple[str, ...]  # JSON schema's names of types; (): any

TEXT_ONLY: Types = ("string",)
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def json_of(text: str, types: Types) -> str:
    """Returns the JSON of a value: as it stands where it is JSON of such a type, else a string."""
    written = text.strip()
    kind = _kind(written)
    if kind is not None and _is_among(kind, types):
        return sendable(written)
    word = _WORDS.get(written.lower())
    if word in types and "string" not in types:  # as Python writes them
        return "null" if word == "null" else written.lower()
    return sendable(json.dumps(text, ensure_ascii=False))


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
