"""Source, the raw text of a choice, and the steps with which the formats parse it.

A parser is a generator: it yields events, and None to wait for more text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator

from api.output_parsers.events import OutputEvent, Span, Text, TextSpans
from api.output_parsers.json_scanner import JsonScanner

# Most white space before a marker that belongs to the format. More is text: held back text is read
# again with every piece that arrives.
MAX_SPACE_CHARS = 1024
_SPACE = re.compile(rf"\s{{0,{MAX_SPACE_CHARS + 1}}}")
# Most text that is held back for a possible call. It bounds the work of reading it again.
MAX_HEAD_CHARS = 65_536
MAX_WORD_CHARS = 256
SPACES = " \t\n\r"
_WORD = re.compile(r"[\w.:-]*")


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


# Yields events, and None where it needs more text to continue.
Reading = Iterator[OutputEvent | None]


def text_before(
    source: Source, markers: str | tuple[str, ...], make: Callable[[str], OutputEvent], span: Span
) -> Iterator[OutputEvent | None]:
    """Yields the text before the next of the `markers`, and holds back a possible marker.

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


# Steps that read from an index on and take nothing: they look for a tool call. Each waits for the
# text that it needs, and raises NotACall for text other than expected, at the end of the text and
# beyond MAX_HEAD_CHARS.


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
    """Returns the index after any white space there, where more text is."""
    while (yield from char_at(source, index)) in SPACES:
        index += 1
    return index


def expect(source: Source, index: int, char: str) -> Generator[None, None, int]:
    """Returns the index after a character, and after white space in front of it."""
    index = yield from space_at(source, index)
    if source.text[index] != char:
        raise NotACall
    return index + 1


def comma_or_end(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the comma or the brace that follows, and the index after it."""
    index = yield from space_at(source, index)
    char = source.text[index]
    if char not in ",}":
        raise NotACall
    return char, index + 1


def string_at(source: Source, index: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the JSON string that begins there, decoded, and the index after it."""
    if (yield from char_at(source, index)) != '"':
        raise NotACall
    end = yield from value_at(source, index)
    try:
        return str(json.loads(source.text[index:end])), end
    except ValueError:  # a raw line break
        raise NotACall from None


def value_at(source: Source, index: int) -> Generator[None, None, int]:
    """Returns the index after the JSON value that begins there."""
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
    after it. It ends with another character."""
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
    """Returns the index after this text, which must stand there."""
    end = yield from optional_at(source, index, text)
    if end == index:
        raise NotACall
    return end


def until_at(source: Source, index: int, text: str) -> Generator[None, None, tuple[str, int]]:
    """Returns the text before this one, and the index after it."""
    while True:
        last = index + MAX_WORD_CHARS + len(text)
        at = source.text.find(text, index, last)
        if at >= 0:
            return source.text[index:at], at + len(text)
        if len(source.text) >= last:
            raise NotACall
        yield from char_at(source, len(source.text))


def optional_at(source: Source, index: int, text: str) -> Generator[None, None, int]:
    """Returns the index after this text if it stands there, else the index."""
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


# Sections of calls in text, each after an opening marker: the loop that most formats share.

# Parses a call that begins at an index of the source. Raises NotACall for other text, before it has
# taken anything.
ReadCalls = Callable[[int], Generator[OutputEvent | None, None, None]]


def text_and_sections(
    source: Source, openings: tuple[str, ...], read: ReadCalls, *, call_tag: str = ""
) -> Reading:
    """Parses text and, with `read`, the calls after each opening marker. An opening that no call
    follows is text. White space after a section belongs to nothing.

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
    """Parses a call at `source.text[start]` and those after it, up to a closing marker or to other
    text. Raises NotACall and takes nothing where there is no first one."""
    yield from read(start)
    while not (yield from take_if_next(source, closing, Span.CALL)):
        try:
            yield from read(0)
        except NotACall:
            return
