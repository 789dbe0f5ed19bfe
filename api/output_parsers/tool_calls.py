"""Tool calls in generated text, `{"name": ..., "arguments": {...}}`, parsed while they arrive.

Shared by the formats that write a call as one JSON object, whatever they put around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field

from api.ids import with_short_id
from api.output_parsers.events import OutputEvent, Span, ToolArguments, ToolCall
from api.output_parsers.json_scanner import JsonScanner
from api.output_parsers.parser import Types
from api.output_parsers.reading import (
    NotACall,
    Reading,
    Source,
    char_at,
    comma_or_end,
    expect,
    num_held,
    space_at,
    string_at,
    value_at,
)
from api.output_parsers.typed_values import sendable

NAMES = ("name", "tool_name")  # others', and Cohere's; all formats accept each
ARGUMENTS = ("arguments", "parameters")  # Hermes' and Llama's key; both formats accept each


@dataclass(slots=True)
class CallableTools:
    """The tools that a choice may call; numbers the calls. `types`: of their parameters, by name,
    where a format does not write the type of a value."""

    names: Collection[str]
    new_call_id: Callable[[int], str]
    types: Mapping[str, Mapping[str, Types]] = field(default_factory=dict)
    num_calls: int = 0

    def types_of(self, name: str, key: str) -> Types:
        """Returns the types of one parameter; () for any."""
        return self.types.get(name, {}).get(key, ())

    def begin(self, name: str, written_id: str = "") -> ToolCall:
        """Returns the event of the next call. `written_id`: of nine letters and digits, which the
        next turn's prompt must have again; "" or another where the model wrote none."""
        index = self.num_calls
        self.num_calls += 1
        return ToolCall(index, with_short_id(self.new_call_id(index), written_id), name)


@dataclass(frozen=True, slots=True)
class Family:
    """How the calls of a format are parsed.

    `ends_of_reasoning`: markers of calls that models also write before they have closed their
    reasoning. Each is or contains a special token, which reasoning about a call does not contain.
    """

    read: Callable[[Source, CallableTools], Reading]
    ends_of_reasoning: tuple[str, ...] = ()


def read_call(
    source: Source, start: int, tools: CallableTools, closing: str | None
) -> Generator[OutputEvent | None, None, None]:
    """Parses the object that begins at `source.text[start]`, or after white space there.

    Raises NotACall and takes nothing until the name is known and the arguments begin. From then on
    arguments are passed on while they arrive; arguments that stop being JSON are passed on as they
    are, up to `closing` or the end of the text. Arguments that stand before the name, or are a
    string, null or missing, come in one piece.
    """
    index = yield from expect(source, start, "{")
    name: str | None = None
    arguments = "{}"
    while True:
        index = yield from space_at(source, index)
        key, index = yield from string_at(source, index)
        index = yield from expect(source, index, ":")
        index = yield from space_at(source, index)
        if key in NAMES and name is None:
            name, index = yield from string_at(source, index)
            if name not in tools.names:
                raise NotACall
        elif key in ARGUMENTS:
            first = yield from char_at(source, index)
            if first == "{" and name is not None:
                source.take(index, Span.CALL)
                call = tools.begin(name)
                yield call
                yield from stream_arguments(source, call.index, closing)
                yield from _rest_of_object(source)
                return
            begin, index = index, (yield from value_at(source, index))
            arguments = _object_text(source.text[begin:index])
        else:
            index = yield from value_at(source, index)
        char, index = yield from comma_or_end(source, index)
        if char == "}":
            break
    if name is None:
        raise NotACall
    source.take(index, Span.CALL)
    call = tools.begin(name)
    yield call
    yield ToolArguments(call.index, arguments)


def stream_arguments(
    source: Source, call_index: int, closing: str | None
) -> Generator[OutputEvent | None, None, None]:
    """Passes on the JSON object at the front, whole or broken off, up to `closing`."""
    scanner = JsonScanner()
    while True:
        end = scanner.scan(source.text)
        if end:
            yield ToolArguments(call_index, source.take(end, Span.CALL))
        if scanner.is_done:
            return
        if scanner.is_broken:
            break
        if source.has_ended:
            return
        yield None
    while True:
        at = -1 if closing is None else source.text.find(closing)
        end = at if at >= 0 else len(source.text)
        if at < 0 and closing is not None and not source.has_ended:
            end -= num_held(source.text, closing)
        if end:
            yield ToolArguments(call_index, source.take(end, Span.CALL))
        if at >= 0 or source.has_ended:
            return
        yield None


def _rest_of_object(source: Source) -> Generator[None, None, None]:
    """Takes what follows the arguments, including the brace; nothing if there is no brace."""
    index = 0
    try:
        while True:
            char, index = yield from comma_or_end(source, index)
            if char == "}":
                break
            index = yield from space_at(source, index)
            _, index = yield from string_at(source, index)
            index = yield from expect(source, index, ":")
            index = yield from value_at(source, (yield from space_at(source, index)))
    except NotACall:
        return
    source.take(index, Span.CALL)


def _object_text(value: str) -> str:
    """Returns the arguments' JSON text; `{}` for null. Raises NotACall for no object."""
    if value.startswith("{"):
        return value
    try:
        parsed = json.loads(value)
        text = "{}" if parsed is None else parsed
        if isinstance(text, str) and isinstance(json.loads(text), dict):
            return sendable(text)
    except (ValueError, RecursionError):
        pass
    raise NotACall
