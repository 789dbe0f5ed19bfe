"""OpenAI's harmony format: messages on channels, of gpt-oss.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`;
a call has a recipient in its header, `to=functions.name`, and ends with `<|call|>`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from api.output_parsers.events import OutputEvent, Reasoning, Span, Text, ToolArguments
from api.output_parsers.reading import (
    MAX_SPACE_CHARS,
    Reading,
    Source,
    first_of,
    marker_at,
    may_become,
    num_spaces,
    space_dropped,
    text_before,
)
from api.output_parsers.tool_calls import CallableTools, Family, stream_arguments
from shared.text.tool_formats import ToolFormat

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
MAX_HEADER_CHARS = 1024

_ENDS = (END, RETURN, CALL, START)
_MARKERS = (START, CHANNEL, MESSAGE)
_OPENINGS = (*_MARKERS, "to=")  # what a header may begin with
_NO_HEADER = (END, RETURN, CALL)
_ANY = (*_NO_HEADER, *_OPENINGS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>\w])to=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class _Header:
    """A message's header: its length and its members."""

    num_chars: int
    channel: str
    recipient: str | None


def harmony(source: Source, tools: CallableTools, *, is_open: bool = False) -> Reading:
    """Parses messages: analysis is reasoning, calls of functions are calls, other text is text.

    `is_open`: the prompt has opened a message of analysis. Text without a header is text, and so is
    a message to a recipient that may not be called, with its header.
    """
    shown = _Shown()
    if is_open:
        yield from _content(source, shown, Reasoning, Span.REASONING)
    while True:
        yield from _ends_dropped(source)
        if not source.text:
            return
        header = yield from _header(source)
        if header is None:
            yield from _without_header(source, shown)
            continue
        name = None if header.recipient is None else header.recipient.removeprefix(FUNCTIONS)
        if name is not None and name in tools.names:
            source.take(header.num_chars, Span.CALL)
            yield from _call(source, tools, name)
        elif header.channel == ANALYSIS:
            source.take(header.num_chars, Span.REASONING)
            yield from _content(source, shown, Reasoning, Span.REASONING)
        elif name is None and header.channel in (FINAL, COMMENTARY):
            source.take(header.num_chars, Span.SPACE)
            yield from _content(source, shown, Text, Span.TEXT)
        else:
            yield from shown.next(Text)
            yield Text(source.take(header.num_chars, Span.TEXT))
            yield from _content(source, shown, Text, Span.TEXT, begun=True)


class _Shown:
    """Whether reasoning or text was shown: a further message then starts on a new line."""

    def __init__(self) -> None:
        self._kinds: set[type[Text] | type[Reasoning]] = set()

    def next(self, kind: type[Text] | type[Reasoning]) -> Generator[OutputEvent, None, None]:
        if kind in self._kinds:
            yield kind("\n")
        self._kinds.add(kind)


def _content(
    source: Source,
    shown: _Shown,
    kind: type[Text] | type[Reasoning],
    span: Span,
    *,
    begun: bool = False,
) -> Generator[OutputEvent | None, None, None]:
    """Yields a message's text, up to its end. `begun`: a part of it was yielded before."""
    for event in text_before(source, _ENDS, kind, span):
        if event is not None and not begun:
            begun = True
            yield from shown.next(kind)
        yield event
    if source.text and span is Span.REASONING:  # the marker counts as reasoning
        at = first_of(source.text, _ENDS)
        if not source.text.startswith(START, at):
            source.take(source.text.index("|>", at) + len("|>"), span)


def _call(
    source: Source, tools: CallableTools, name: str
) -> Generator[OutputEvent | None, None, None]:
    call = tools.begin(name)
    yield call
    yield from space_dropped(source)
    if (yield from _is_next(source, _ENDS)):
        yield ToolArguments(call.index, "{}")
        return
    yield from stream_arguments(source, call.index, CALL)


def _without_header(source: Source, shown: _Shown) -> Generator[OutputEvent | None, None, None]:
    """Yields at least one character of text, up to a possible header."""
    space = num_spaces(source.text)
    begin = marker_at(source.text, space, _MARKERS) if space <= MAX_SPACE_CHARS else None
    yield from shown.next(Text)
    if begin is not None:
        yield Text(source.take(space + len(begin), Span.TEXT))
    yield from text_before(source, (*_ENDS, CHANNEL), Text, Span.TEXT)


def _header(source: Source) -> Generator[None, None, _Header | None]:
    """Returns the header at the front, or None."""
    while True:
        space = num_spaces(source.text)
        if space > MAX_SPACE_CHARS or not may_become(source.text, space, _OPENINGS):
            return None
        end = source.text.find(MESSAGE, 0, MAX_HEADER_CHARS + len(MESSAGE))
        head = source.text[: end if end >= 0 else MAX_HEADER_CHARS]
        if first_of(head, _NO_HEADER) >= 0:
            return None
        if end >= 0:
            return _parsed(head, end + len(MESSAGE))
        if source.has_ended or len(source.text) >= MAX_HEADER_CHARS + len(MESSAGE):
            return None
        yield None


def _parsed(head: str, num_chars: int) -> _Header:
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    role = head.partition(CHANNEL)[0].replace(START, "").strip()
    default = FINAL if role in ("", "assistant") else ""
    return _Header(
        num_chars,
        default if channel is None else channel[1],
        None if recipient is None else recipient[1],
    )


def _ends_dropped(source: Source) -> Generator[None, None, None]:
    """Drops the ends of messages, and white space before them and before a header."""
    while True:
        space = num_spaces(source.text)
        if space > MAX_SPACE_CHARS:
            return
        found = marker_at(source.text, space, _NO_HEADER)
        if found is not None:
            source.take(space + len(found), Span.SPACE)
            continue
        is_all = space == len(source.text)
        begins = marker_at(source.text, space, _OPENINGS)
        if source.has_ended or begins or not may_become(source.text, space, _ANY):
            if is_all or begins in (START, CHANNEL):
                source.take(space, Span.SPACE)
            return
        yield None


def _is_next(source: Source, markers: tuple[str, ...]) -> Generator[None, None, bool]:
    while True:
        if source.text.startswith(markers):
            return True
        may_grow = any(each.startswith(source.text) for each in markers)
        if source.has_ended or not may_grow:
            return may_grow and bool(source.text)
        yield None


FAMILIES: Mapping[ToolFormat, Family] = {ToolFormat.OPENAI: Family(harmony)}
