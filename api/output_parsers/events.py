"""OutputParser: parses a choice's text into events while it arrives.

Events are pieces of the answer, of the reasoning and of tool calls. PlainParser is for text without
the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


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


class Span(Enum):
    """Kinds of raw text, once it is decided."""

    TEXT = "text"  # part of the answer, as it stands
    REASONING = "reasoning"  # with its markers
    CALL = "call"  # with its markers
    SPACE = "space"  # around calls and after reasoning: part of the format, never shown


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


class OutputParser(Protocol):
    """Parses one choice. How its text is split into pushes changes no content."""

    @property
    def has_calls(self) -> bool:
        """Returns whether a tool call has started."""
        ...

    @property
    def reasoning_bytes(self) -> int:
        """Returns how many UTF-8 bytes of the raw text are reasoning so far, markers included."""
        ...

    @property
    def spans(self) -> TextSpans | None:
        """Returns the ranges of raw text that are text of the output; None: all of it."""
        ...

    def push(self, text: str) -> Sequence[OutputEvent]:
        """Returns the events that `text` completes; holds back what may become a marker."""
        ...

    def finish(self) -> Sequence[OutputEvent]:
        """Returns the last events. Nothing is pushed afterwards."""
        ...


class PlainParser:
    """Passes all text on as the answer."""

    has_calls = False
    reasoning_bytes = 0
    spans = None

    def push(self, text: str) -> Sequence[OutputEvent]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[OutputEvent]:
        return ()


NewParser = Callable[[], OutputParser]
