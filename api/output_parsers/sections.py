"""Sections of calls amid text, each behind an opening marker: the loop that most formats share."""

from __future__ import annotations

from collections.abc import Callable, Generator

from api.output_parsers.events import (
    OutputEvent,
    Reading,
    Source,
    Span,
    Text,
    first_of,
    marker_at,
    space_dropped,
    text_before,
)
from api.output_parsers.reading import NotACall, take_if_next

# Parses what begins at an index of the source. Raises NotACall where that is none, before it has
# taken anything.
ReadCalls = Callable[[int], Generator[OutputEvent | None, None, None]]


def text_and_sections(
    source: Source, openings: tuple[str, ...], read: ReadCalls, *, call_tag: str = ""
) -> Reading:
    """Parses text and, with `read`, what is behind each opening marker. An opening that no call
    follows is text. White space behind a section belongs to nothing.

    `call_tag` begins each call of a section, "" where nothing does. Models leave the opening out:
    then `read` begins at this tag.
    """
    markers = (*openings, call_tag) if call_tag else openings
    while True:
        yield from text_before(source, markers, Text, Span.TEXT)
        if not source.text:
            return
        at = first_of(source.text, markers)
        marker = marker_at(source.text, at, markers) or ""
        try:
            yield from read(at if marker == call_tag else at + len(marker))
        except NotACall:
            yield Text(source.take(at + len(marker), Span.TEXT))
            continue
        yield from space_dropped(source)


def calls_up_to(
    source: Source, start: int, closing: str, read: ReadCalls
) -> Generator[OutputEvent | None, None, None]:
    """Parses a call at `source.text[start]` and those behind it, up to a closing marker or to what
    is no call. Raises NotACall and takes nothing where there is no first one."""
    yield from read(start)
    while not (yield from take_if_next(source, closing, Span.CALL)):
        try:
            yield from read(0)
        except NotACall:
            return
