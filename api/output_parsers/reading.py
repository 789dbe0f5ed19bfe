"""Reads parts of a source from an index on, without taking them: what may become a tool call.

Each function waits for text that it needs, and raises NotACall where it cannot be what is expected,
at the end of the text, and beyond MAX_HEAD_CHARS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from api.output_parsers.events import MAX_SPACE_CHARS, Source, Span, may_become, num_spaces
from api.output_parsers.json_scanner import JsonScanner

# Held back until a call is known to be one. Bounds the work of reading again what was none.
MAX_HEAD_CHARS = 65_536
MAX_WORD_CHARS = 256
SPACES = " \t\n\r"
_WORD = re.compile(r"[\w.:-]*")


class NotACall(Exception):
    """Raised for text that is no tool call. Nothing of it was taken."""


def char_at(source: Source, index: int) -> Generator[None, None, str]:
    """Returns the character there."""
    if index >= MAX_HEAD_CHARS:
        raise NotACall
    while index >= len(source.text):
        if source.has_ended:
            raise NotACall
        yield None
    return source.text[index]


def space_at(source: Source, index: int) -> Generator[None, None, int]:
    """Returns the index behind any white space there, where more text is."""
    while (yield from char_at(source, index)) in SPACES:
        index += 1
    return index


def expect(source: Source, index: int, char: str) -> Generator[None, None, int]:
    """Returns the index behind a character, and behind white space in front of it."""
    index = yield from space_at(source, index)
    if source.text[index] != char:
        raise NotACall
    return index + 1


def comma_or_end(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the comma or the brace that follows, and the index behind it."""
    index = yield from space_at(source, index)
    char = source.text[index]
    if char not in ",}":
        raise NotACall
    return char, index + 1


def string_at(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the JSON string that begins there, decoded, and the index behind it."""
    if (yield from char_at(source, index)) != '"':
        raise NotACall
    end = yield from value_at(source, index)
    try:
        return str(json.loads(source.text[index:end])), end
    except ValueError:  # a raw line break
        raise NotACall from None


def value_at(source: Source, index: int) -> Generator[None, None, int]:
    """Returns the index behind the JSON value that begins there."""
    scanner = JsonScanner()
    while True:
        index = scanner.scan(source.text, index)
        if index > MAX_HEAD_CHARS:
            raise NotACall
        if scanner.is_done:
            return index
        if scanner.is_broken or source.has_ended:
            raise NotACall
        yield None


def word_at(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the name that begins there, of letters, digits, `_`, `-`, `.` and `:`, and the index
    behind it. It ends with a character that is none of these."""
    end = index
    while True:
        found = _WORD.match(source.text, end)
        end = index if found is None else found.end()
        if end - index > MAX_WORD_CHARS:
            raise NotACall
        if end < len(source.text):
            return source.text[index:end], end
        yield from _more(source, end)


def literal_at(source: Source, index: int, text: str) -> Generator[None, None, int]:
    """Returns the index behind this text, which must stand there."""
    end = yield from optional_at(source, index, text)
    if end == index:
        raise NotACall
    return end


def until_at(source: Source, index: int, text: str) -> Generator[None, None, tuple[str, int]]:
    """Returns what stands there before this text, and the index behind the text."""
    while True:
        last = index + MAX_WORD_CHARS + len(text)
        at = source.text.find(text, index, last)
        if at >= 0:
            return source.text[index:at], at + len(text)
        if len(source.text) >= last:
            raise NotACall
        yield from char_at(source, len(source.text))


def optional_at(source: Source, index: int, text: str) -> Generator[None, None, int]:
    """Returns the index behind this text if it stands there, else the index."""
    while True:
        found = source.text[index : index + len(text)]
        if found == text:
            return index + len(text)
        if source.has_ended or not text.startswith(found):
            return index
        yield None


def take_if_next(source: Source, text: str, span: Span) -> Generator[None, None, bool]:
    """Takes this text, and white space before it, if it is next. Returns whether it was."""
    while True:
        space = num_spaces(source.text)
        if space > MAX_SPACE_CHARS:
            return False
        if source.text.startswith(text, space):
            source.take(space + len(text), span)
            return True
        if source.has_ended or not may_become(source.text, space, (text,)):
            return False
        yield None


def _more(source: Source, index: int) -> Generator[None, None, None]:
    yield from char_at(source, index)
