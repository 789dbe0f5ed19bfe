"""FormatParser: parses reasoning and tool calls in the formats of the model, loaded by name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from api.ids import call_id, random_seed
from api.on_demand import load_part
from api.output_parsers.events import OutputEvent, ToolArguments, ToolCall
from api.output_parsers.formats import plain_text, reasoning_first
from api.output_parsers.parser import ParserConfig, Thinking
from api.output_parsers.reading import Reading, Source
from api.output_parsers.tool_calls import CallableTools, Family
from shared.text.tool_formats import ReasoningFormat, ToolFormat

SLICE_CHARS = 1024  # parsed at a time: taking from the front copies the rest

# Parts (`api.on_demand`) with families, the most common first.
PARTS = ("formats", "named_calls", "json_lists", "xml_calls", "pythonic", "harmony")


@functools.cache
def family_of(tool_format: ToolFormat) -> Family:
    """Returns the parser of a format's calls. Raises KeyError where no part has one."""
    for part in PARTS:
        families: Mapping[ToolFormat, Family] = load_part(part).FAMILIES
        if tool_format in families:
            return families[tool_format]
    raise KeyError(tool_format)


def new_parser(
    config: ParserConfig, seed: str, choice: int, names: Collection[str] | None = None
) -> FormatParser:
    """Returns the parser of one choice; the ids of its calls derive from `seed` and its number, or
    are random without one. `names`: overrides the config's."""
    seed = seed or random_seed()
    tools = CallableTools(
        config.names if names is None else names,
        lambda call: call_id(seed, choice, call),
        config.types,
    )
    return FormatParser(lambda source: _read(source, tools, config))


class FormatParser:
    """Runs the generator of a format. Never raises, whatever the text is."""

    def __init__(self, read: Callable[[Source], Reading]) -> None:
        self.has_calls = False
        self._source = Source()
        self._reading = read(self._source)
        self.spans = self._source.spans

    @property
    def reasoning_bytes(self) -> int:
        return self._source.reasoning_bytes

    def push(self, text: str) -> Sequence[OutputEvent]:
        events: list[OutputEvent] = []
        for begin in range(0, len(text), SLICE_CHARS):
            self._source.text += text[begin : begin + SLICE_CHARS]
            events += self._read()
        return merged(events)

    def finish(self) -> Sequence[OutputEvent]:
        self._source.has_ended = True
        return merged(self._read())

    def _read(self) -> Iterator[OutputEvent]:
        for event in self._reading:
            if event is None:
                return
            self.has_calls |= isinstance(event, ToolCall)
            yield event


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Returns the events with consecutive pieces joined and empty ones dropped."""
    found: list[OutputEvent] = []
    shown = (event for event in events if isinstance(event, ToolCall) or event.text)
    for _, run in itertools.groupby(shown, _run_of):
        first, *rest = run
        if isinstance(first, ToolCall) or not rest:
            found += [first, *rest]
            continue
        text = "".join(event.text for event in (first, *rest) if not isinstance(event, ToolCall))
        found.append(dataclasses.replace(first, text=text))
    return found


def _run_of(event: OutputEvent) -> tuple[type[OutputEvent], int]:
    """Returns the key by which consecutive pieces of one text are joined."""
    return type(event), event.index if isinstance(event, ToolCall | ToolArguments) else 0


def _read(source: Source, tools: CallableTools, config: ParserConfig) -> Reading:
    if config.reasoning_format is ReasoningFormat.OPENAI or config.tool_format is ToolFormat.OPENAI:
        yield from load_part("harmony").harmony(
            source, tools, is_open=config.thinking is Thinking.OPEN
        )
        return
    if config.reasoning_format is not None:
        is_open = config.thinking is Thinking.OPEN
        family = family_of(config.tool_format) if tools.names and config.tool_format else None
        ends = () if family is None else family.ends_of_reasoning
        yield from reasoning_first(source, config.reasoning_format, is_open=is_open, ends=ends)
    if not tools.names or config.tool_format is None:
        yield from plain_text(source)
    else:
        yield from family_of(config.tool_format).read(source, tools)
