"""Tool calls in generated text, `{"name": ..., "arguments": {...}}`, parsed while they arrive.

Shared by the formats that write a call as one JSON object, whatever they put around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from enum import Enum

from api.output_parsers.events import OutputEvent, Source, Span, ToolArguments, ToolCall, num_held

ARGUMENTS = ("arguments", "parameters")  # Hermes' and Llama's key; both formats accept each
_SPACES = " \t\n\r"


class NotACall(Exception):
    """Raised for text that is no tool call. Nothing of it was taken."""


@dataclass(slots=True)
class CallableTools:
    """The tools that a choice may call; numbers the calls."""

    names: Collection[str]
    new_call_id: Callable[[int], str]
    num_calls: int = 0

    def begin(self, name: str) -> ToolCall:
        """Returns the event of the next call."""
        index = self.num_calls
        self.num_calls += 1
        return ToolCall(index, self.new_call_id(index), name)


def read_call(
    source: Source, start: int, tools: CallableTools, closing: str | None
) -> Generator[OutputEvent | None, None, None]:
    """Parses the object that begins at `source.text[start]`, or behind white space there.

    Raises NotACall and takes nothing until the name is known and the arguments begin. From then on
    arguments are passed on while they arrive; arguments that stop being JSON are passed on as they
    are, up to `closing` or the end of the text. Arguments that stand before the name, or are a
    string, null or missing, come in one piece.
    """
    index = yield from _expect(source, start, "{")
    name: str | None = None
    arguments = "{}"
    while True:
        index = yield from _space(source, index)
        key, index = yield from _string(source, index)
        index = yield from _expect(source, index, ":")
        index = yield from _space(source, index)
        if key == "name" and name is None:
            name, index = yield from _string(source, index)
            if name not in tools.names:
                raise NotACall
        elif key in ARGUMENTS:
            first = yield from _char(source, index)
            if first == "{" and name is not None:
                source.take(index, Span.CALL)
                call = tools.begin(name)
                yield call
                yield from _stream_arguments(source, call.index, closing)
                yield from _rest_of_object(source)
                return
            begin, index = index, (yield from _value(source, index))
            arguments = _object_text(source.text[begin:index])
        else:
            index = yield from _value(source, index)
        char, index = yield from _comma_or_end(source, index)
        if char == "}":
            break
    if name is None:
        raise NotACall
    source.take(index, Span.CALL)
    call = tools.begin(name)
    yield call
    yield ToolArguments(call.index, arguments)


def _stream_arguments(
    source: Source, call_index: int, closing: str | None
) -> Generator[OutputEvent | None, None, None]:
    scanner = JsonScanner()
    while True:
        end = scanner.scan(source.text)
        if end:
            yield ToolArguments(call_index, source.take(end, Span.CALL))
        if scanner.is_done:
            return
        if scanner.is_broken:
            break
        if source.has_ended:
            return
        yield None
    while True:
        at = -1 if closing is None else source.text.find(closing)
        end = at if at >= 0 else len(source.text)
        if at < 0 and closing is not None and not source.has_ended:
            end -= num_held(source.text, closing)
        if end:
            yield ToolArguments(call_index, source.take(end, Span.CALL))
        if at >= 0 or source.has_ended:
            return
        yield None


def _rest_of_object(source: Source) -> Generator[None, None, None]:
    """Takes what follows the arguments, including the brace; nothing if there is no brace."""
    index = 0
    try:
        while True:
            char, index = yield from _comma_or_end(source, index)
            if char == "}":
                break
            index = yield from _space(source, index)
            _, index = yield from _string(source, index)
            index = yield from _expect(source, index, ":")
            index = yield from _value(source, (yield from _space(source, index)))
    except NotACall:
        return
    source.take(index, Span.CALL)


def _char(source: Source, index: int) -> Generator[None, None, str]:
    while index >= len(source.text):
        if source.has_ended:
            raise NotACall
        yield None
    return source.text[index]


def _space(source: Source, index: int) -> Generator[None, None, int]:
    while (yield from _char(source, index)) in _SPACES:
        index += 1
    return index


def _expect(source: Source, index: int, char: str) -> Generator[None, None, int]:
    index = yield from _space(source, index)
    if source.text[index] != char:
        raise NotACall
    return index + 1


def _comma_or_end(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    index = yield from _space(source, index)
    char = source.text[index]
    if char not in ",}":
        raise NotACall
    return char, index + 1


def _string(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    if (yield from _char(source, index)) != '"':
        raise NotACall
    end = yield from _value(source, index)
    try:
        return str(json.loads(source.text[index:end])), end
    except ValueError:  # a raw line break
        raise NotACall from None


def _value(source: Source, index: int) -> Generator[None, None, int]:
    """Returns the index behind the value."""
    scanner = JsonScanner()
    while True:
        index = scanner.scan(source.text, index)
        if scanner.is_done:
            return index
        if scanner.is_broken or source.has_ended:
            raise NotACall
        yield None


def _object_text(value: str) -> str:
    """Returns the arguments' JSON text; `{}` for null. Raises NotACall for no object."""
    if value.startswith("{"):
        return value
    try:
        parsed = json.loads(value)
        text = "{}" if parsed is None else parsed
        if isinstance(text, str) and isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise NotACall


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
    """One value, from its first character. Accepts what JSON is, and raw line breaks in strings,
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
        """Goes on at `text[start]`, which follows what was scanned before.

        Returns the index behind what belongs to the value: `len(text)` while it is open, else the
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
