"""Formats of tool calls and reasoning in generated text, parsed while it arrives."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from api.output_parsers.events import OutputEvent, Reasoning, Span, Text
from api.output_parsers.reading import (
    MAX_SPACE_CHARS,
    NotACall,
    Reading,
    Source,
    first_of,
    marker_at,
    may_become,
    num_spaces,
    space_dropped,
    take_if_next,
    text_and_sections,
    text_before,
)
from api.output_parsers.tool_calls import CallableTools, Family, read_call
from shared.text.tool_formats import (
    ANSWER_MARKERS,
    REASONING_MARKERS,
    ReasoningFormat,
    ToolFormat,
)

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # where a tokenizer does not have it as a special token


def plain_text(source: Source) -> Reading:
    """Yields all text as the answer."""
    if source.answer_end:
        yield from text_before(source, (), Text, Span.TEXT)
    while True:
        if source.text:
            yield Text(source.take(len(source.text), Span.TEXT))
        if source.has_ended:
            return
        yield None


def hermes_calls(source: Source, tools: CallableTools) -> Reading:
    """Parses text and calls in any order, each call an object in <tool_call> and </tool_call>.

    An opening marker that no call follows is text. A closing marker may be missing.
    """

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        yield from read_call(source, start, tools, HERMES_CLOSE)
        yield from take_if_next(source, HERMES_CLOSE, Span.CALL)

    return text_and_sections(source, (HERMES_OPEN,), read)


def llama3_json_calls(source: Source, tools: CallableTools) -> Reading:
    """Parses calls from the first character on, separated by `;` or white space, then text.

    Text that does not begin with the object of a call is text to its end.
    """
    yield from _python_tag(source)
    lead = yield from _before_object(source, "")
    while lead is not None:
        try:
            yield from read_call(source, lead, tools, None)
        except NotACall:
            break
        yield from space_dropped(source)
        lead = yield from _before_object(source, ";")
    yield from plain_text(source)


def _python_tag(source: Source) -> Iterator[None]:
    while True:
        space = num_spaces(source.text)
        if space > MAX_SPACE_CHARS:
            return
        if source.text.startswith(PYTHON_TAG, space):
            source.take(space + len(PYTHON_TAG), Span.SPACE)
            return
        if source.has_ended or not may_become(source.text, space, (PYTHON_TAG,)):
            return
        yield None


def _before_object(source: Source, separator: str) -> Generator[None, None, int | None]:
    """Returns the index of a brace after white space and at most one separator, or None."""
    index, separators = 0, separator
    while index <= MAX_SPACE_CHARS:
        if index == len(source.text):
            if source.has_ended:
                return None
            yield None
            continue
        char = source.text[index]
        if char == "{":
            return index
        if separators and char == separators:
            separators = ""
        elif not char.isspace():
            return None
        index += 1
    return None


def reasoning_first(
    source: Source,
    reasoning_format: ReasoningFormat = ReasoningFormat.THINK,
    *,
    is_open: bool,
    ends: tuple[str, ...] = (),
) -> Reading:
    """Parses reasoning at the start of the text, up to a closing marker or the end of the text.

    `is_open`: the prompt has opened it. Otherwise only text that begins with an opening marker has
    any. `ends`: markers that also end it and are not part of it. Takes a marker that
    begins the answer; then the source knows the one that ends it.
    """
    opening, closing = REASONING_MARKERS[reasoning_format]
    while True:
        space = num_spaces(source.text)
        is_near = space <= MAX_SPACE_CHARS
        found = marker_at(source.text, space, opening) if is_near else None
        if found is not None:
            source.take(space + len(found), Span.REASONING)
            break
        if source.has_ended or not is_near or not may_become(source.text, space, opening):
            if not is_open:
                return
            break
        yield None
    yield from space_dropped(source)
    yield from text_before(source, (*closing, *ends), Reasoning, Span.REASONING)
    if source.text:
        at = first_of(source.text, (*closing, *ends))
        found = marker_at(source.text, at, closing) or ""
        source.take(at + len(found), Span.REASONING)
        yield from space_dropped(source)
    if reasoning_format in ANSWER_MARKERS:
        answer_begin, answer_end = ANSWER_MARKERS[reasoning_format]
        if (yield from take_if_next(source, answer_begin, Span.SPACE)):
            source.answer_end = answer_end
            yield from space_dropped(source)


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.HERMES: Family(hermes_calls),
    ToolFormat.LLAMA3_JSON: Family(llama3_json_calls),
    ToolFormat.TEXT: Family(lambda source, tools: plain_text(source)),
}
