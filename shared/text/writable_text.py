"""WritableText: the characters that a vocabulary can write, and grammars narrowed to them.

A byte-level vocabulary that was trained without an initial alphabet lacks tokens for the bytes that
its texts did not have. A grammar must not lead an output to one of them: it could not continue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shared.text.base import GrammarInvalid
from shared.text.grammar import lark_parts

UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
MAX_RANGES = 512  # of characters in one expression; beyond, those of three and four bytes are cut

_JSON_SIGNS = '{}[]":, -0123456789truefalsn'
_PRINTABLE = frozenset(map(chr, range(0x20, 0x7F))) | {"\n"}
# Without these an expression of printable ASCII can be written in each of its branches.
_MAY_NEED_OTHERS = re.compile(r"[^ -~\n\t]|\\[xupUP]|\[\^[^\]]*-")
_LITERAL = re.compile(r'//[^\n]*|("(?:[^"\\\n]|\\.)*")|/((?:[^/\\\n]|\\.)+)/')
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xuU]\{([0-9a-fA-F]{1,6})\})")
_NAMED_SCHEMAS = ("patternProperties", "$defs", "definitions")


class WritableText:
    """Texts that can be written with one token for each of some bytes, and longer ones of them."""

    def __init__(self, present: Collection[int]) -> None:
        """`present`: the bytes that are tokens."""
        self._present = frozenset(present)
        self.is_any = self._present >= UTF8_BYTES
        self._has_printable = self.unwritable("".join(_PRINTABLE)) is None
        self._class = "" if self.is_any else "".join(_class_ranges(self._present))

    def unwritable(self, text: str) -> str | None:
        """Returns the first character that cannot be written; None if all can."""
        if self.is_any or self._present.issuperset(text.encode(errors="replace")):
            return None
        return next(char for char in text if not self._present.issuperset(char.encode()))

    def regex(self, pattern: str) -> str:
        """Returns a Lark grammar of the texts that match and can be written."""
        return f"start: TEXT\nTEXT: /{pattern}/ & /{self._any_of(pattern)}/\n"

    def narrows(self, pattern: str) -> bool:
        """Returns whether some text that matches might have a character that cannot be written, at
        a place where no other may stand."""
        if self.is_any:
            return False
        return not self._has_printable or _MAY_NEED_OTHERS.search(pattern) is not None

    def lark(self, text: str) -> str:
        """Returns the grammar with its schemas narrowed. Raises GrammarInvalid for a text in it
        that cannot be written."""
        parts = []
        for part in lark_parts(text):
            if isinstance(part, str):
                self._check_lark(part)
                parts.append(part)
            else:
                parts.append(json.dumps(self.schema(part)))
        return "".join(parts)

    def schema(self, schema: Any) -> Any:
        """Returns a schema, as grammar_schema left it, without the values that cannot be written.
        Raises GrammarInvalid if JSON itself cannot be."""
        missing = self.unwritable(_JSON_SIGNS)
        if missing is not None:
            raise GrammarInvalid(f"JSON cannot be written: {no_token(missing)}")
        narrowed = self._narrowed(schema)
        if narrowed is False and schema is not False:
            missing = self.unwritable(json.dumps(schema, ensure_ascii=False))
            assert missing is not None, "only unwritable text is dropped"
            raise GrammarInvalid(no_token(missing))
        return narrowed

    def _narrowed(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._narrowed(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        kept: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "enum" and isinstance(value, list):
                value = [each for each in value if self._can_be_json(each)]
                if not value:
                    return False
            elif keyword == "const" and not self._can_be_json(value):
                return False
            elif keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
                value = {name: self._narrowed(each) for name, each in value.items()}
            elif keyword == "properties" and isinstance(value, Mapping):
                value = {
                    name: self._can_be_json(name) and self._narrowed(each)
                    for name, each in value.items()
                }
            elif keyword in _SCHEMAS:
                value = self._narrowed(value)
            kept[keyword] = value
        required = kept.get("required")
        names = required if isinstance(required, list) else []
        if unwritable := {str(each): False for each in names if not self._can_be_json(each)}:
            kept["properties"] = {**kept.get("properties", {}), **unwritable}
        pattern = kept.get("pattern")
        if isinstance(pattern, str) and self.narrows(pattern):
            others = kept.get("allOf")
            joined = others if isinstance(others, list) else []
            kept["allOf"] = [*joined, {"pattern": f"^{self._any_of(pattern)}$"}]
        return kept

    def _can_be_json(self, value: Any) -> bool:
        return self.unwritable(json.dumps(value, ensure_ascii=False)) is None

    def _any_of(self, pattern: str) -> str:
        """Returns an expression of any text that can be written; characters that the pattern names
        are among its own."""
        named = {char for char in pattern if not char.isascii() and self.unwritable(char) is None}
        return f"[{self._class}{''.join(sorted(named))}]*"

    def _check_lark(self, text: str) -> None:
        for found in _LITERAL.finditer(text):
            missing = self.unwritable(literal_text(found[1] or found[2] or ""))
            if missing is not None:
                raise GrammarInvalid(no_token(missing))


_SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf"}
)


def literal_text(pattern: str) -> str:
    """Returns the characters that a pattern or a quoted text names, those in escapes too."""

    def decoded(found: re.Match[str]) -> str:
        number = int(found[1] or found[2] or found[3], 16)
        return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else ""

    return _ESCAPED.sub(decoded, pattern)


def no_token(char: str) -> str:
    """Returns the sentence about a character that cannot be written."""
    shown = repr(char) if char.isprintable() else f"U+{ord(char):04X}"
    return f"the model's vocabulary has no token for the character {shown}, which the grammar needs"


def _class_ranges(present: frozenset[int]) -> Iterator[str]:
    """Yields the characters of whose UTF-8 each byte is present, as ranges of a character class."""
    ranges: list[list[int]] = []
    for code in _writable_codes(present):
        if ranges and code.start == ranges[-1][1]:
            ranges[-1][1] = code.stop
        elif len(ranges) < MAX_RANGES:
            ranges.append([code.start, code.stop])
        else:
            break
    for start, stop in ranges:
        yield f"{_code(start)}-{_code(stop - 1)}"


def _code(number: int) -> str:
    return f"\\x{{{number:x}}}"


def _writable_codes(present: frozenset[int]) -> Iterator[range]:
    """Yields runs of such characters in order, those that share all bytes but the last together."""
    rests = [byte - 0x80 for byte in range(0x80, 0xC0) if byte in present]
    for byte in range(0x80):
        if byte in present:
            yield range(byte, byte + 1)
    for length, first, last in ((2, 0xC2, 0xDF), (3, 0xE0, 0xEF), (4, 0xF0, 0xF4)):
        low = {2: 0x80, 3: 0x800, 4: 0x10000}[length]
        for lead in range(first, last + 1):
            if lead not in present:
                continue
            blocks = [lead & (0x7F >> length)]
            for _ in range(length - 2):
                blocks = [block * 64 + rest for block in blocks for rest in rests]
            for block in blocks:
                for run in _runs(rests):
                    codes = range(block * 64 + run.start, block * 64 + run.stop)
                    is_surrogate = 0xD800 <= codes.start < 0xE000
                    if codes.start >= low and codes.stop <= 0x110000 and not is_surrogate:
                        yield codes


def _runs(numbers: list[int]) -> Iterator[range]:
    start = None
    for number, after in zip(numbers, [*numbers[1:], -1], strict=True):
        start = number if start is None else start
        if after != number + 1:
            yield range(start, number + 1)
            start = None
