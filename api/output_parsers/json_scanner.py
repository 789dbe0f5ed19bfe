"""JsonScanner: finds where one JSON value ends, in text that is still arriving."""

from __future__ import annotations

import re
from enum import Enum

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]+')
_NUMBER = re.compile(r"[-+.0-9eE]+")
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_NUMBER_CHARS = 4096  # more are no number that anybody means


class _Expects(Enum):
    VALUE = 0
    VALUE_OR_END = 1  # after '['
    KEY = 2
    KEY_OR_END = 3  # after '{'
    COLON = 4
    COMMA_OR_END = 5
    NOTHING = 6


class JsonScanner:
    """One value, from its first character. Accepts JSON, and raw line breaks in strings,
    which models write and which do not move a string's end."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False  # no text that follows can make it JSON
        self._expects = _Expects.VALUE
        self._closers: list[str] = []  # of the open arrays and objects
        self._in_string = False
        self._is_key = False
        self._escape = ""  # '\\', or '\\u' and the digits so far
        self._atom = ""  # of an open number or word

    def scan(self, text: str, start: int = 0) -> int:
        """Continues at `text[start]`, which follows the scanned text.

        Returns the index after the value: `len(text)` while it is open, else the
        first character that is not part of it, or that breaks it.
        """
        index = start
        while index < len(text) and not (self.is_done or self.is_broken):
            if self._in_string:
                index = self._string(text, index)
            elif self._atom:
                more = self._more_word if self._atom[0] in _WORDS else self._more_number
                index = more(text, index)
            else:
                index = self._between(text, index)
        return index

    def _between(self, text: str, index: int) -> int:
        space = _SPACE.match(text, index)
        assert space is not None
        index = space.end()
        if index == len(text):
            return index
        char, expects = text[index], self._expects
        if expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            if char == "]" and expects is _Expects.VALUE_OR_END:
                return self._close(index)
            return self._begin(char, index)
        if expects in (_Expects.KEY, _Expects.KEY_OR_END):
            if char == '"':
                self._in_string = self._is_key = True
                return index + 1
            if char == "}" and expects is _Expects.KEY_OR_END:
                return self._close(index)
        elif expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
            return index + 1
        elif expects is _Expects.COMMA_OR_END:
            if char == ",":
                in_object = self._closers[-1] == "}"
                self._expects = _Expects.KEY if in_object else _Expects.VALUE
                return index + 1
            if char == self._closers[-1]:
                return self._close(index)
        self.is_broken = True
        return index

    def _begin(self, char: str, index: int) -> int:
        if char == '"':
            self._in_string = True
        elif char == "{":
            self._closers.append("}")
            self._expects = _Expects.KEY_OR_END
        elif char == "[":
            self._closers.append("]")
            self._expects = _Expects.VALUE_OR_END
        elif char in "-0123456789tfn":
            self._atom = char
        else:
            self.is_broken = True
            return index
        return index + 1

    def _close(self, index: int) -> int:
        self._closers.pop()
        self._value_ended()
        return index + 1

    def _value_ended(self) -> None:
        self._expects = _Expects.COMMA_OR_END if self._closers else _Expects.NOTHING
        self.is_done = not self._closers

    def _string(self, text: str, index: int) -> int:
        if self._escape:
            return self._more_escape(text[index], index)
        plain = _PLAIN.match(text, index)
        if plain is not None:
            return plain.end()
        if text[index] == "\\":
            self._escape = "\\"
        else:
            self._in_string = False
            if self._is_key:
                self._is_key = False
                self._expects = _Expects.COLON
            else:
                self._value_ended()
        return index + 1

    def _more_escape(self, char: str, index: int) -> int:
        if self._escape == "\\":
            if char == "u":
                self._escape = "\\u"
                return index + 1
            if char not in '"\\/bfnrt':
                self.is_broken = True
                return index
            self._escape = ""
            return index + 1
        if char not in _HEX:
            self.is_broken = True
            return index
        self._escape += char
        if len(self._escape) == len("\\u0000"):
            self._escape = ""
        return index + 1

    def _more_word(self, text: str, index: int) -> int:
        word = _WORDS[self._atom[0]]
        while index < len(text) and len(self._atom) < len(word):
            if text[index] != word[len(self._atom)]:
                self.is_broken = True
                return index
            self._atom += text[index]
            index += 1
        if self._atom == word:
            self._atom = ""
            self._value_ended()
        return index

    def _more_number(self, text: str, index: int) -> int:
        more = _NUMBER.match(text, index)
        end = index if more is None else more.end()
        self._atom += text[index:end]
        if len(self._atom) > _MAX_NUMBER_CHARS:
            self.is_broken = True
        elif end < len(text):
            self.is_broken = _WHOLE_NUMBER.fullmatch(self._atom) is None
            self._atom = ""
            if not self.is_broken:
                self._value_ended()
        return end
