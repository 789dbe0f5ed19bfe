"""OutputParser: parses a choice's text into events while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from api.output_parsers.events import (
    OutputEvent,
    Reading,
    Reasoning,
    Source,
    Text,
    TextSpans,
    ToolArguments,
    ToolCall,
)


class OutputParser(Protocol):
    """Parses one choice. How its text is split into pushes changes no content."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        ...

    @property
    def reasoning_bytes(self) -> int:
        """UTF-8 bytes of the raw text that are reasoning so far, markers included."""
        ...

    @property
    def spans(self) -> TextSpans | None:
        """The ranges of raw text that are text of the answer; None: all of it."""
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


class FormatParser:
    """Runs a format of `api.output_parsers.formats`. Never raises, whatever the text is."""

    def __init__(self, read: Callable[[Source], Reading]) -> None:
        self.has_calls = False
        self._source = Source()
        self._reading = read(self._source)
        self.spans = self._source.spans

    @property
    def reasoning_bytes(self) -> int:
        return self._source.reasoning_bytes

    def push(self, text: str) -> Sequence[OutputEvent]:
        self._source.text += text
        return self._read()

    def finish(self) -> Sequence[OutputEvent]:
        self._source.has_ended = True
        return self._read()

    def _read(self) -> Sequence[OutputEvent]:
        events = []
        for event in self._reading:
            if event is None:
                break
            self.has_calls |= isinstance(event, ToolCall)
            events.append(event)
        return merged(events)


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Returns the events with consecutive pieces joined and empty ones dropped."""
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, ToolCall):
            found.append(event)
        elif not event.text:
            continue
        elif isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, ToolArguments)
            and isinstance(last, ToolArguments)
            and event.index == last.index
        ):
            found[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


NewParser = Callable[[], OutputParser]
