"""Formats of calls that write each argument between two tags: GLM's, Qwen3-Coder's, MiniMax's,
and DeepSeek's DSML.

The values are bare text. They become JSON by the types that the tool's schema gives them; in DSML
an attribute marks those that are texts.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial

from api.output_parsers.events import OutputEvent, Span, ToolArguments
from api.output_parsers.parser import Types
from api.output_parsers.reading import (
    NotACall,
    Reading,
    Source,
    calls_up_to,
    literal_at,
    num_held,
    optional_at,
    space_at,
    take_if_next,
    text_and_sections,
    until_at,
    word_at,
)
from api.output_parsers.tool_calls import CallableTools, Family
from api.output_parsers.typed_values import NO_TEXT, TEXT_ONLY, begun_json, json_of
from shared.text.tool_formats import DSML, ToolFormat


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of a format. `name`, `key` and `value`: the texts before and after one.

    `section_close` ends a section of several calls, "" where each call has the opening.
    `is_framed`: a value is on lines of its own. `has_string_attribute`: the tag of a key has
    `string="true"` where its value is text and `string="false"` where it is JSON.
    """

    opening: str
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    call_close: str
    section_close: str = ""
    is_framed: bool = False
    has_string_attribute: bool = False


GLM = Markup(
    opening="<tool_call>",
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    call_close="</tool_call>",
)
QWEN3_CODER = Markup(
    opening="<tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call_close="</function>",
    section_close="</tool_call>",
    is_framed=True,
)
SEED_OSS = Markup(
    opening="<seed:tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call_close="</function>",
    section_close="</seed:tool_call>",
)
MINIMAX_M2 = Markup(
    opening="<minimax:tool_call>",
    name=('<invoke name="', '">'),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    call_close="</invoke>",
    section_close="</minimax:tool_call>",
)


def _dsml(section: str, space: str) -> Markup:
    return Markup(
        opening=f"<{DSML}{section}>",
        name=(f'<{DSML}{space}invoke name="', '">'),
        key=(f'<{DSML}{space}parameter name="', '"'),
        value=("", f"</{DSML}{space}parameter>"),
        call_close=f"</{DSML}{space}invoke>",
        section_close=f"</{DSML}{section}>",
        has_string_attribute=True,
    )


DEEPSEEK_V32 = _dsml("function_calls", "")
DEEPSEEK_V4 = _dsml("tool_calls", "")
DEEPSEEK_V41 = _dsml(" calls", " ")


def tagged_calls(source: Source, tools: CallableTools, markup: Markup) -> Reading:
    """Parses text and calls in the tags of a format."""

    def read(start: int) -> Generator[OutputEvent | None, None, None]:
        return _call(source, start, tools, markup)

    def read_section(start: int) -> Generator[OutputEvent | None, None, None]:
        return calls_up_to(source, start, markup.section_close, read)

    return text_and_sections(
        source,
        (markup.opening,),
        read_section if markup.section_close else read,
        call_tag=markup.name[0],
    )


def _call(
    source: Source, start: int, tools: CallableTools, markup: Markup
) -> Generator[OutputEvent | None, None, None]:
    """Parses a call. Raises NotACall and takes nothing where no argument and no end follows its
    name. If something else is at the place of one of these, the call ends."""
    index = yield from space_at(source, start)
    if markup.name[0]:
        index = yield from literal_at(source, index, markup.name[0])
    name, index = yield from word_at(source, index)
    if name not in tools.names:
        raise NotACall
    if markup.name[1]:
        index = yield from literal_at(source, index, markup.name[1])
    index = yield from space_at(source, index)
    if (yield from optional_at(source, index, markup.call_close)) == index:
        yield from literal_at(source, index, markup.key[0])
    source.take(index, Span.CALL)
    call = tools.begin(name)
    yield call
    yield ToolArguments(call.index, "{")
    separator = ""
    while not (yield from take_if_next(source, markup.call_close, Span.CALL)):
        try:
            key, marked, index = yield from _key(source, markup)
        except NotACall:
            if source.has_ended:  # within a tag
                source.take(len(source.text), Span.CALL)
            else:
                yield ToolArguments(call.index, "}")
            return
        source.take(index, Span.CALL)
        yield ToolArguments(call.index, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        types = marked or tools.types_of(name, key)
        if types == TEXT_ONLY:
            yield from _text(source, call.index, markup)
        else:
            yield from _value(source, call.index, markup, types)
    yield ToolArguments(call.index, "}")


def _key(source: Source, markup: Markup) -> Generator[None, None, tuple[str, Types, int]]:
    """Returns the name of the argument at the front, the types that its tag allows (() where it has
    no attribute for that), and the index where its value begins."""
    types: Types = ()
    index = yield from space_at(source, 0)
    index = yield from literal_at(source, index, markup.key[0])
    key, index = yield from until_at(source, index, markup.key[1])
    if markup.value[0]:
        index = yield from space_at(source, index)
        index = yield from literal_at(source, index, markup.value[0])
    if markup.has_string_attribute:
        index = yield from space_at(source, index)
        behind = yield from optional_at(source, index, 'string="')
        if behind > index:
            word, index = yield from until_at(source, behind, '"')
            types = TEXT_ONLY if word == "true" else NO_TEXT
        index = yield from literal_at(source, (yield from space_at(source, index)), ">")
    return key.strip(), types, index


def _text(
    source: Source, call_index: int, markup: Markup
) -> Generator[OutputEvent | None, None, None]:
    """Passes a text on while it arrives."""
    yield ToolArguments(call_index, '"')
    closing = markup.value[1]
    if markup.is_framed:
        yield from _line_break(source)
    while True:
        at = source.text.find(closing)
        end = at if at >= 0 else len(source.text)
        if at < 0:
            end -= num_held(source.text, closing)
        is_whole = at >= 0 or not source.has_ended
        frame = int(markup.is_framed and is_whole and source.text[:end].endswith("\n"))
        text = source.take(end - frame, Span.CALL)
        yield ToolArguments(call_index, json.dumps(text, ensure_ascii=False)[1:-1])
        if at >= 0:
            source.take(frame + len(closing), Span.CALL)
            yield ToolArguments(call_index, '"')
            return
        if source.has_ended:
            source.take(len(source.text), Span.CALL)
            return
        yield None


def _line_break(source: Source) -> Generator[None, None, None]:
    while not source.text and not source.has_ended:
        yield None
    if source.text.startswith("\n"):
        source.take(1, Span.CALL)


def _value(
    source: Source, call_index: int, markup: Markup, types: Types
) -> Generator[OutputEvent | None, None, None]:
    """Passes a value on when it is whole: its type depends on all of it."""
    closing, gathered = markup.value[1], list[str]()
    while True:
        at = source.text.find(closing)
        if at >= 0:
            text = "".join((*gathered, source.text[:at]))
            source.take(at + len(closing), Span.CALL)
            if markup.is_framed:
                text = text.removeprefix("\n").removesuffix("\n")
            yield ToolArguments(call_index, json_of(text, types))
            return
        if source.has_ended:
            gathered.append(source.take(len(source.text), Span.CALL))
            yield ToolArguments(call_index, begun_json("".join(gathered), types))
            return
        gathered.append(source.put_aside(len(source.text) - num_held(source.text, closing)))
        yield None


def _tagged(markup: Markup) -> Family:
    return Family(partial(tagged_calls, markup=markup))


def _dsml_tagged(markup: Markup) -> Family:
    return Family(partial(tagged_calls, markup=markup), (markup.opening, markup.name[0]))


FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.DEEPSEEK_V32: _dsml_tagged(DEEPSEEK_V32),
    ToolFormat.DEEPSEEK_V4: _dsml_tagged(DEEPSEEK_V4),
    ToolFormat.DEEPSEEK_V41: _dsml_tagged(DEEPSEEK_V41),
    ToolFormat.GLM45: _tagged(GLM),
    ToolFormat.QWEN3_CODER: _tagged(QWEN3_CODER),
    ToolFormat.SEED_OSS: _tagged(SEED_OSS),
    ToolFormat.MINIMAX_M2: _tagged(MINIMAX_M2),
}
