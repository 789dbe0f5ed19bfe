"""Events of generated text: answer, reasoning, tool calls; and the raw text they are read from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

# Of white space that stands before a marker and is the format's. More is text: what is held back is
# looked at again with every piece that arrives.
MAX_SPACE_CHARS = 1024
_SPACE = re.compile(rf"\s{{0,{MAX_SPACE_CHARS + 1}}}")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The begin of a tool call. `index` counts a choice's calls from 0; `call_id` is unique."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


OutputEvent = Text | Reasoning | ToolCall | ToolArguments


Result = TypeVar("Result")


class Span(Enum):
    """Kinds of raw text, once it is decided."""

    TEXT = "text"  # part of the answer, as it stands
    REASONING = "reasoning"  # with its markers
    CALL = "call"  # with its markers
    SPACE = "space"  # around calls and behind reasoning: part of the format, never shown


class TextSpans:
    """The ranges of a choice's raw text, in UTF-8 bytes, that became text of the answer."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of raw text that is decided
        self._spans: list[tuple[int, int]] = []
        self._first = 0

    def add(self, num_bytes: int, span: Span) -> None:
        start, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        if span is not Span.TEXT:
            return
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        self._spans.append((start, self.num_bytes))

    def holds(self, start: int, end: int) -> bool:
        """Returns whether a byte of [start, end) is text of the answer.

        An empty range counts as the byte before it. Callers pass ranges in ascending order.
        """
        if start == end:
            start, end = max(0, start - 1), max(1, end)
        while self._first < len(self._spans) and self._spans[self._first][1] <= start:
            self._first += 1
        return self._first < len(self._spans) and self._spans[self._first][0] < end


class Source:
    """Raw text of a choice that is not decided yet. Parsers take it from the front."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False  # no more will be added
        self.reasoning_bytes = 0  # from the start of the raw text to the end of the reasoning
        self.spans = TextSpans()
        self.answer_end = ""  # a marker that ends the answer and is not shown
        self._num_aside_bytes = 0

    def put_aside(self, num_chars: int) -> str:
        """Removes and returns the first characters. They are of the kind of the next `take`, and
        undecided until then: so a long value is gathered without being copied for each piece."""
        aside, self.text = self.text[:num_chars], self.text[num_chars:]
        self._num_aside_bytes += len(aside.encode())
        return aside

    def take(self, num_chars: int, span: Span) -> str:
        """Removes and returns the first characters, which are of the kind `span`."""
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        self.spans.add(self._num_aside_bytes + len(taken.encode()), span)
        self._num_aside_bytes = 0
        if span is Span.REASONING:
            self.reasoning_bytes = self.spans.num_bytes
        return taken


# Yields events, and None where it needs more text to go on.
Reading = Iterator[OutputEvent | None]


def text_before(
    source: Source, markers: str | tuple[str, ...], make: Callable[[str], OutputEvent], span: Span
) -> Iterator[OutputEvent | None]:
    """Yields the text before the next of the `markers`, and holds back what may become one.

    Ends with the source at the marker or at the white space in front of it, of which the last
    MAX_SPACE_CHARS count; without a marker, at the end of the text. Drops the end of the answer.
    """
    wanted = (markers,) if isinstance(markers, str) else markers
    while True:
        markers = (*wanted, source.answer_end) if source.answer_end else wanted
        at = first_of(source.text, markers)
        if at < 0 and source.has_ended:
            if source.text:
                yield make(source.take(len(source.text), span))
            return
        held = 0 if at >= 0 else max(num_held(source.text, marker) for marker in markers)
        end = at if at >= 0 else len(source.text) - held
        end = max(len(source.text[:end].rstrip()), end - MAX_SPACE_CHARS)
        if end:
            yield make(source.take(end, span))
        if at < 0:
            yield None
        elif marker_at(source.text, at - end, wanted) is not None:
            return
        else:
            source.take(at - end + len(source.answer_end), Span.SPACE)
            source.answer_end = ""


def first_of(text: str, markers: tuple[str, ...]) -> int:
    """Returns where the first of the markers begins, or -1."""
    found = [at for at in map(text.find, markers) if at >= 0]
    return min(found, default=-1)


def space_dropped(source: Source) -> Iterator[None]:
    """Drops the white space at the front, which belongs to no content."""
    while True:
        num_chars = len(source.text) - len(source.text.lstrip())
        if num_chars:
            source.take(num_chars, Span.SPACE)
        if source.text or source.has_ended:
            return
        yield None


def num_held(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of `marker`."""
    begin = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while begin >= 0:
        if marker.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(marker[0], begin + 1)
    return 0


def num_spaces(text: str) -> int:
    """Returns how many characters in front are white space, counted to MAX_SPACE_CHARS + 1."""
    found = _SPACE.match(text)
    return 0 if found is None else found.end()


def marker_at(text: str, index: int, markers: tuple[str, ...]) -> str | None:
    """Returns which of the markers stands there, if one does."""
    return next((marker for marker in markers if text.startswith(marker, index)), None)


def may_become(text: str, index: int, markers: tuple[str, ...]) -> bool:
    """Returns whether the text from there on is one of the markers, or the beginning of one."""
    return any(marker.startswith(text[index : index + len(marker)]) for marker in markers)
