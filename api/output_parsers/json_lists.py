"""Formats of calls that write a list of objects, `[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial

from api.output_parsers.events import OutputEvent, Span
from api.output_parsers.reading import (
    NotACall,
    Reading,
    Source,
    expect,
    space_at,
    take_if_next,
    text_and_sections,
)
from api.output_parsers.tool_calls import CallableTools, Family, read_call
from shared.text.tool_formats import ToolFormat

GRANITE_OPEN = ("<|tool_call|>", "<tool_call>")  # of Granite 3.0, and of 3.1 and later
GRANITE_CLOSE = "</tool_call>"
PHI4_OPEN = "functools"
HUNYUAN_OPEN, HUNYUAN_CLOSE = "<tool_calls>", "</tool_calls>"
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
COHERE_OPEN, COHERE_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"


def list_calls(
    source: Source, tools: CallableTools, openings: tuple[str, ...], closing: str | None
) -> Reading:
    """Parses text and lists of calls, each after an opening marker; `closing` may follow a list."""

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        yield from read_list(source, start, tools, closing)
        if closing is not None:
            yield from take_if_next(source, closing, Span.CALL)

    return text_and_sections(source, openings, read)


def read_list(
    source: Source, start: int, tools: CallableTools, closing: str | None = None
) -> Generator[OutputEvent | None, None, None]:
    """Parses the list of calls that begins at `source.text[start]`, or one call without a list.

    Raises NotACall and takes nothing where its first element is no call. It ends with the list, or
    in front of the first element that is not a call. `closing`: the marker after it, if any.
    """
    index = yield from space_at(source, start)
    is_list = source.text[index] == "["
    yield from read_call(source, index + is_list, tools, closing)
    while is_list and not (yield from take_if_next(source, "]", Span.CALL)):
        try:
            index = yield from expect(source, 0, ",")
            yield from read_call(source, index, tools, closing)
        except NotACall:
            return


def _lists(*openings: str, closing: str | None = None) -> Family:
    return Family(partial(list_calls, openings=openings, closing=closing))


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.GRANITE: _lists(*GRANITE_OPEN, closing=GRANITE_CLOSE),
    ToolFormat.PHI4_MINI_JSON: _lists(PHI4_OPEN),
    ToolFormat.HUNYUAN_A13B: _lists(HUNYUAN_OPEN, closing=HUNYUAN_CLOSE),
    ToolFormat.NEMOTRON_JSON: _lists(NEMOTRON_OPEN, closing=NEMOTRON_CLOSE),
    ToolFormat.COHERE_COMMAND3: _lists(COHERE_OPEN, closing=COHERE_CLOSE),
}
