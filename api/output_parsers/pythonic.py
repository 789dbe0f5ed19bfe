"""Calls that are written as in Python, and Gemma's, whose values are written almost as JSON.

Llama 4 and 3.2, and Gemma 3 write `[get_weather(city="Oslo", days=2)]`; FunctionGemma and Gemma 4
write `call:get_weather{city:<escape>Oslo<escape>,days:2}` between two markers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Generator, Mapping
from functools import partial

from api.output_parsers.events import OutputEvent, Span, ToolArguments
from api.output_parsers.formats import plain_text
from api.output_parsers.literals import PYTHON, LiteralConverter, Syntax
from api.output_parsers.parser import Types
from api.output_parsers.reading import (
    NotACall,
    Reading,
    Source,
    char_at,
    expect,
    literal_at,
    optional_at,
    space_at,
    space_dropped,
    take_if_next,
    text_and_sections,
    text_before,
    word_at,
)
from api.output_parsers.tool_calls import CallableTools, Family
from api.output_parsers.typed_values import json_of
from shared.text.tool_formats import ToolFormat

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_TAGS = (PYTHON_START, "<|python_tag|>", "```tool_code", "```python")
_FENCE = "```"
FUNCTIONGEMMA_OPEN, FUNCTIONGEMMA_CLOSE = "<start_function_call>", "<end_function_call>"
FUNCTIONGEMMA_QUOTE = "<escape>"
GEMMA4_OPEN, GEMMA4_CLOSE, GEMMA4_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTIONGEMMA = Syntax(('"',), (FUNCTIONGEMMA_QUOTE,), bare_texts=True)
GEMMA4 = Syntax(('"',), (GEMMA4_QUOTE,), bare_texts=True)


def pythonic_calls(source: Source, tools: CallableTools) -> Reading:
    """Parses calls from the first character on, in a list or one to a line of a block of code, then
    text. Text that does not begin with a call of a tool is text to its end."""
    try:
        is_list = yield from _first_call(source, tools)
        while (yield from _is_more(source, is_list=is_list)):
            yield from _call(source, 0, tools)
    except NotACall:
        pass
    if tools.num_calls:
        for text in ("]", PYTHON_END, _FENCE):
            yield from take_if_next(source, text, Span.CALL)
        yield from space_dropped(source)
    yield from plain_text(source)


def _first_call(source: Source, tools: CallableTools) -> Generator[OutputEvent | None, None, bool]:
    index = begin = yield from space_at(source, 0)
    for tag in _TAGS:
        if index == begin:
            index = yield from optional_at(source, index, tag)
    behind = yield from space_at(source, index)
    is_list = source.text[behind] == "["
    if not is_list and index == begin:
        raise NotACall
    yield from _call(source, behind + is_list, tools)
    return is_list


def _is_more(source: Source, *, is_list: bool) -> Generator[None, None, bool]:
    """Takes the comma before a further call, if there is one."""
    if is_list:
        return (yield from take_if_next(source, ",", Span.CALL))
    index = yield from space_at(source, 0)
    return "\n" in source.text[:index]


def _call(
    source: Source, start: int, tools: CallableTools
) -> Generator[OutputEvent | None, None, None]:
    """Parses a call. Raises NotACall and takes nothing until its first argument begins. Arguments
    that stop being Python are passed on as they are, to the end of the text."""
    index = yield from space_at(source, start)
    name, index = yield from word_at(source, index)
    index = yield from expect(source, index, "(")
    if name not in tools.names:
        raise NotACall
    behind = yield from space_at(source, index)
    if source.text[behind] != ")":
        yield from _key(source, behind)
    source.take(index, Span.CALL)
    call = tools.begin(name)
    yield call
    yield ToolArguments(call.index, "{")
    separator = ""
    while not (yield from take_if_next(source, ")", Span.CALL)):
        if separator and not (yield from take_if_next(source, ",", Span.CALL)):
            yield from _as_it_is(source, call.index)
            return
        if (yield from take_if_next(source, ")", Span.CALL)):
            break
        try:
            key, index = yield from _key(source, 0)
        except NotACall:
            yield from _as_it_is(source, call.index)
            return
        source.take(index, Span.CALL)
        yield ToolArguments(call.index, f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _argument(source, call.index, tools.types_of(name, key))
    yield ToolArguments(call.index, "}")


def _key(source: Source, start: int) -> Generator[None, None, tuple[str, int]]:
    """Returns the name of the argument there, and the index where its value begins."""
    index = yield from space_at(source, start)
    key, index = yield from word_at(source, index)
    index = yield from expect(source, index, "=")
    if not key or (yield from char_at(source, index)) == "=":
        raise NotACall
    return key, index


def _argument(
    source: Source, call_index: int, types: Types
) -> Generator[OutputEvent | None, None, None]:
    """Converts a value. A text that the schema does not allow may be another value in quotes."""
    gathers = bool(types) and "string" not in types
    yield from _value(source, call_index, PYTHON, types if gathers else None)


def _value(
    source: Source, call_index: int, syntax: Syntax, types: Types | None
) -> Generator[OutputEvent | None, None, bool]:
    """Converts the value at the front. Returns whether it was one. `types`: gathers what begins as
    a text, and reads it by them."""
    converter, gathered = LiteralConverter(syntax), list[str]()
    holds = types is not None
    while True:
        index, converted = converter.convert(source.text, has_ended=source.has_ended)
        if converted:
            gathered.append(converted)
        holds = holds and (not gathered or gathered[0].startswith('"'))
        if holds and not converter.is_done and not converter.is_broken:
            source.put_aside(index)
        else:
            source.take(index, Span.CALL)
            text = "".join(gathered)
            gathered.clear()
            if holds and converter.is_done:
                text = json_of(json.loads(text), types or ())
            holds = False
            yield ToolArguments(call_index, text)
        if converter.is_done:
            return True
        if converter.is_broken or source.has_ended:
            return False
        yield None


def _as_it_is(source: Source, call_index: int) -> Generator[OutputEvent | None, None, None]:
    """Passes on all text that follows as arguments; but nothing of a text
    that breaks off here."""
    if source.has_ended:
        source.take(len(source.text), Span.CALL)
    while True:
        if source.text:
            yield ToolArguments(call_index, source.take(len(source.text), Span.CALL))
        if source.has_ended:
            return
        yield None


def gemma_calls(
    source: Source, tools: CallableTools, opening: str, closing: str, syntax: Syntax
) -> Reading:
    """Parses text and calls between the markers of one of Gemma's formats."""

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        index = yield from space_at(source, start)
        index = yield from literal_at(source, index, "call:")
        name, index = yield from word_at(source, index)
        index = yield from expect(source, index, "{")
        if name not in tools.names:
            raise NotACall
        source.take(index - 1, Span.CALL)
        call = tools.begin(name)
        yield call
        if not (yield from _value(source, call.index, syntax, None)):
            if source.has_ended:
                source.take(len(source.text), Span.CALL)
            piece = functools.partial(ToolArguments, call.index)
            yield from text_before(source, closing, piece, Span.CALL)
        yield from take_if_next(source, closing, Span.CALL)

    return text_and_sections(source, (opening,), read)


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.PYTHONIC: Family(pythonic_calls),
    ToolFormat.FUNCTIONGEMMA: Family(
        partial(
            gemma_calls,
            opening=FUNCTIONGEMMA_OPEN,
            closing=FUNCTIONGEMMA_CLOSE,
            syntax=FUNCTIONGEMMA,
        )
    ),
    ToolFormat.GEMMA4: Family(
        partial(gemma_calls, opening=GEMMA4_OPEN, closing=GEMMA4_CLOSE, syntax=GEMMA4)
    ),
}
