"""LiteralConverter: turns one value that is written almost as JSON into JSON, while it arrives."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum

from api.output_parsers.reading import num_held

MAX_DEPTH = 128  # of values within values
MAX_BARE_CHARS = 4096  # of a number, a word or a key without quotes
_SPACE = re.compile(r"\s*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER = re.compile(r"[-+]?[0-9._]+([eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_SIMPLE_ESCAPES = frozenset('"\\bfnrt')
_HEX = re.compile(r"[0-9a-fA-F]+")
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Syntax:
    """How values are written. `escaped`: quotes of texts with backslashes in them; `raw`: of texts
    that are what stands between. `bare_texts`: keys and texts may stand without quotes."""

    escaped: tuple[str, ...]
    raw: tuple[str, ...] = ()
    bare_texts: bool = False


PYTHON = Syntax(('"""', "'''", '"', "'"))


# The end of a number, a name or a key without quotes, by whether it is a key and may have spaces.
BARE_ENDS = {
    (False, False): re.compile(r"[,\]})\s]"),
    (False, True): re.compile(r"[,\]}]"),
    (True, False): re.compile(r"[:\s]"),
    (True, True): re.compile(r":"),
}


class _Expects(Enum):
    VALUE = 0
    KEY = 1
    COLON = 2
    COMMA = 3  # or the end of the open value


class LiteralConverter:
    """One value, from its first character."""

    def __init__(self, syntax: Syntax) -> None:
        self.is_done = False
        self.is_broken = False  # no text that follows can make it a value
        self._syntax = syntax
        self._quotes = (*syntax.escaped, *syntax.raw)
        self._expects = _Expects.VALUE
        self._closers: list[str] = []  # of the open lists and objects
        self._is_first = True  # nothing in the innermost of them yet
        self._quote = ""  # of an open text
        self._num_searched = 0  # of a bare word's characters, for its end
        self._json: list[str] = []

    def convert(self, text: str, *, has_ended: bool) -> tuple[int, str]:
        """Returns how many characters of the text in front were read, and the JSON they become.

        The rest may be the start of something, or follows the value.
        """
        index = 0
        while index < len(text) and not (self.is_done or self.is_broken):
            step = self._within_text if self._quote else self._between
            end = step(text, index, has_ended)
            if end == index and not self.is_done:
                break
            index = end
        converted, self._json = "".join(self._json), []
        return index, converted

    def _between(self, text: str, index: int, has_ended: bool) -> int:
        space = _SPACE.match(text, index)
        begin = index if space is None else space.end()
        if begin == len(text):
            return begin
        char = text[begin]
        if self._closers and char == self._closers[-1] and self._expects is not _Expects.COLON:
            return self._close(begin)
        if self._expects is _Expects.COMMA:
            if char != ",":
                return self._broken(begin)
            self._expects = _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
            return begin + 1
        if self._expects is _Expects.COLON:
            if char != ":":
                return self._broken(begin)
            self._json.append(": ")
            self._expects = _Expects.VALUE
            return begin + 1
        return self._begin(text, begin, has_ended)

    def _begin(self, text: str, index: int, has_ended: bool) -> int:
        """Begins a key or a value."""
        rest = text[index : index + max(map(len, self._quotes))]
        for quote in self._quotes:
            if rest.startswith(quote):
                self._element()
                self._quote = quote
                self._json.append('"')
                return index + len(quote)
            if quote.startswith(rest):
                return index  # it may be this quote
        is_key = self._expects is _Expects.KEY
        char = text[index]
        if not is_key and char in "{[(" and (char != "(" or not self._syntax.bare_texts):
            return self._open(char, index)
        return self._bare(text, index, has_ended, is_key=is_key)

    def _open(self, char: str, index: int) -> int:
        if len(self._closers) == MAX_DEPTH:
            return self._broken(index)
        self._element()
        self._json.append("{" if char == "{" else "[")
        self._closers.append({"{": "}", "[": "]", "(": ")"}[char])
        self._expects = _Expects.KEY if char == "{" else _Expects.VALUE
        self._is_first = True
        return index + 1

    def _close(self, index: int) -> int:
        self._json.append("}" if self._closers.pop() == "}" else "]")
        self._is_first = False
        self._value_ended()
        return index + 1

    def _element(self) -> None:
        """Writes the comma in front of a key, or of a value in a list."""
        in_list = bool(self._closers) and self._closers[-1] != "}"
        if (self._expects is _Expects.KEY or in_list) and not self._is_first:
            self._json.append(", ")
        self._is_first = False

    def _bare(self, text: str, index: int, has_ended: bool, *, is_key: bool) -> int:
        """Reads a number or a word, or where these may be bare a key or a text."""
        ending = BARE_ENDS[is_key, self._syntax.bare_texts]
        found = ending.search(text, index + self._num_searched)
        end = len(text) if found is None else found.start()
        self._num_searched = end - index if found is None else 0
        if end - index > MAX_BARE_CHARS:
            return self._broken(index)
        word = text[index:end].strip()
        converted = _bare_json(word)
        if end == len(text) and not (has_ended and not is_key and converted is not None):
            return index  # an open word may become anything
        if is_key or converted is None:
            if not self._syntax.bare_texts or not word:
                return self._broken(index)
            converted = json.dumps(word, ensure_ascii=False)
        self._element()
        self._json.append(converted)
        self._text_ended(is_key=is_key)
        return end

    def _within_text(self, text: str, index: int, has_ended: bool) -> int:
        """Reads a part of a text, up to an escape or its end."""
        is_raw = self._quote in self._syntax.raw
        if not is_raw and text[index] == "\\":
            return self._escape(text, index, has_ended)
        at = text.find(self._quote, index)
        if not is_raw:
            backslash = text.find("\\", index, at if at >= 0 else len(text))
            at = backslash if backslash >= 0 else at
        end = at if at >= 0 else len(text) - num_held(text, self._quote)
        end = max(end, index)
        self._json.append(json.dumps(text[index:end], ensure_ascii=False)[1:-1])
        if at < 0 or (text[at] == "\\" and not is_raw):
            return end
        self._json.append('"')
        self._text_ended(is_key=self._expects is _Expects.KEY)
        end += len(self._quote)
        self._quote = ""
        return end

    def _escape(self, text: str, index: int, has_ended: bool) -> int:
        if index + 1 == len(text):
            return index
        char = text[index + 1]
        if char in _HEX_ESCAPES:
            end = index + 2 + _HEX_ESCAPES[char]
            digits = text[index + 2 : end]
            if _HEX.fullmatch(digits + "0") is None:
                return self._broken(index)
            if len(text) < end:
                return self._broken(index) if has_ended else index
            self._json.append(f"\\u{digits}" if char == "u" else _character(int(digits, 16)))
            return end
        if char in _SIMPLE_ESCAPES:
            self._json.append(f"\\{char}")
        elif char in "'/":
            self._json.append(char)
        elif char != "\n":  # no escape: the backslash stands for itself
            self._json.append(json.dumps(f"\\{char}", ensure_ascii=False)[1:-1])
        return index + 2

    def _text_ended(self, *, is_key: bool) -> None:
        if is_key:
            self._expects = _Expects.COLON
        else:
            self._value_ended()

    def _value_ended(self) -> None:
        self._expects = _Expects.COMMA
        self.is_done = not self._closers

    def _broken(self, index: int) -> int:
        self.is_broken = True
        return index


def _bare_json(word: str) -> str | None:
    """Returns the JSON of a number or a word; None for anything else."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if not _NUMBER.fullmatch(word):
        return None
    try:
        value = float(word)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _character(code: int) -> str:
    """Returns a character escaped for JSON; U+FFFD for an invalid code point."""
    is_one = code < 0x110000 and not 0xD800 <= code < 0xE000
    return json.dumps(chr(code) if is_one else "\ufffd", ensure_ascii=False)[1:-1]
