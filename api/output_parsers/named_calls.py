"""Formats of calls that write the tool's name, and its arguments as JSON after it.

Mistral's, DeepSeek's and Kimi's. A call stands in its section, or follows the section's marker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial

from api.output_parsers.events import OutputEvent, Span
from api.output_parsers.json_lists import read_list
from api.output_parsers.reading import (
    NotACall,
    Reading,
    Source,
    calls_up_to,
    expect,
    literal_at,
    optional_at,
    space_at,
    take_if_next,
    text_and_sections,
    word_at,
)
from api.output_parsers.tool_calls import CallableTools, Family, stream_arguments
from shared.text.tool_formats import ToolFormat

MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_OPEN, DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DEEPSEEK_CALL_CLOSE = "<｜tool▁call▁end｜>"
DEEPSEEK_FENCE, DEEPSEEK_FENCE_CLOSE = "```json", "```"
KIMI_OPEN, KIMI_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_CALL_CLOSE = "<|tool_call_end|>"

# Reads from an index up to where the arguments begin: (name, the id that the model wrote, index).
_Head = tuple[str, str, int]
_ReadHead = Callable[[Source, int], Generator[None, None, _Head]]


@dataclass(frozen=True, slots=True)
class Section:
    """The markers around calls. `tail`: markers that may follow the arguments, in this order."""

    opening: str
    closing: str
    call_tag: str
    read_head: _ReadHead
    tail: tuple[str, ...]


def mistral_calls(source: Source, tools: CallableTools) -> Reading:
    """Parses text and calls: after each marker one list of objects, or one name with arguments."""

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        begin = yield from space_at(source, start)
        if source.text[begin] in "[{":
            yield from read_list(source, begin, tools)
        else:
            yield from _named_call(source, begin, tools, _mistral_head, MISTRAL_OPEN)

    return text_and_sections(source, (MISTRAL_OPEN,), read)


def section_calls(source: Source, tools: CallableTools, section: Section) -> Reading:
    """Parses text and sections of calls."""

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        return _call_in(source, start, tools, section)

    def read_section(start: int) -> Generator[OutputEvent | None, None, None]:
        return calls_up_to(source, start, section.closing, read)

    return text_and_sections(source, (section.opening,), read_section, call_tag=section.call_tag)


def _call_in(
    source: Source, start: int, tools: CallableTools, section: Section
) -> Generator[OutputEvent | None, None, None]:
    yield from _named_call(source, start, tools, section.read_head, section.tail[-1])
    for text in section.tail:
        yield from take_if_next(source, text, Span.CALL)


def _named_call(
    source: Source, start: int, tools: CallableTools, read_head: _ReadHead, closing: str
) -> Generator[OutputEvent | None, None, None]:
    """Parses a call. Raises NotACall and takes nothing until its arguments begin."""
    name, written_id, index = yield from read_head(source, start)
    index = yield from expect(source, index, "{")
    if name not in tools.names:
        raise NotACall
    source.take(index - 1, Span.CALL)
    call = tools.begin(name, written_id)
    yield call
    yield from stream_arguments(source, call.index, closing)


def _mistral_head(source: Source, index: int) -> Generator[None, None, _Head]:
    name, index = yield from word_at(source, index)
    index = yield from space_at(source, index)
    behind = yield from optional_at(source, index, MISTRAL_ID)
    written_id = ""
    if behind > index:
        written_id, index = yield from word_at(source, behind)
        index = yield from space_at(source, index)
    return name, written_id, (yield from optional_at(source, index, MISTRAL_ARGUMENTS))


def _deepseek_head(source: Source, index: int) -> Generator[None, None, _Head]:
    index = yield from space_at(source, index)
    index = yield from literal_at(source, index, DEEPSEEK_CALL)
    name, index = yield from word_at(source, (yield from space_at(source, index)))
    index = yield from literal_at(source, index, DEEPSEEK_SEPARATOR)
    index = yield from space_at(source, index)
    if name == "function" and source.text[index] != "{":
        name, index = yield from word_at(source, index)
        index = yield from space_at(source, index)
    return name, "", (yield from optional_at(source, index, DEEPSEEK_FENCE))


def _kimi_head(source: Source, index: int) -> Generator[None, None, _Head]:
    index = yield from space_at(source, index)
    index = yield from literal_at(source, index, KIMI_CALL)
    call_id, index = yield from word_at(source, (yield from space_at(source, index)))
    index = yield from space_at(source, index)
    index = yield from literal_at(source, index, KIMI_ARGUMENTS)
    # The id is not kept: `history` numbers the calls of a conversation as the model does.
    return call_id.removeprefix("functions.").partition(":")[0], "", index


# The arguments are bare, or fenced as JSON.
DEEPSEEK = Section(
    DEEPSEEK_OPEN,
    DEEPSEEK_CLOSE,
    DEEPSEEK_CALL,
    _deepseek_head,
    (DEEPSEEK_FENCE_CLOSE, DEEPSEEK_CALL_CLOSE),
)
# The id of a call has the tool's name in it.
KIMI_K2 = Section(KIMI_OPEN, KIMI_CLOSE, KIMI_CALL, _kimi_head, (KIMI_CALL_CLOSE,))


def _sections(section: Section) -> Family:
    return Family(partial(section_calls, section=section), (section.opening, section.call_tag))


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.MISTRAL: Family(mistral_calls, (MISTRAL_OPEN,)),
    ToolFormat.DEEPSEEK_V3: _sections(DEEPSEEK),
    ToolFormat.DEEPSEEK_V31: _sections(DEEPSEEK),
    ToolFormat.KIMI_K2: _sections(KIMI_K2),
}
