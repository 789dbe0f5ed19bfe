"""FormatParser: parses reasoning and tool calls in the formats of the model, loaded by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from api.ids import call_id, random_seed
from api.on_demand import load_part
from api.output_parsers.events import OutputEvent, ToolArguments, ToolCall
from api.output_parsers.formats import plain_text, reasoning_first
from api.output_parsers.parser import ParserConfig, Thinking
from api.output_parsers.reading import Reading, Source
from api.output_parsers.tool_calls import CallableTools, Family
from shared.text.tool_formats import ReasoningFormat, ToolFormat

SLICE_CHARS = 1024  # parsed at a time: taking from the front copies the rest

# format -> the part (`api.on_demand`) that has its Family
FAMILIES: Mapping[ToolFormat, str] = {
    ToolFormat.HERMES: "formats",
    ToolFormat.LLAMA3_JSON: "formats",
    ToolFormat.MISTRAL: "named_calls",
    ToolFormat.DEEPSEEK_V3: "named_calls",
    ToolFormat.DEEPSEEK_V31: "named_calls",
    ToolFormat.DEEPSEEK_V32: "xml_calls",
    ToolFormat.DEEPSEEK_V4: "xml_calls",
    ToolFormat.DEEPSEEK_V41: "xml_calls",
    ToolFormat.KIMI_K2: "named_calls",
    ToolFormat.GRANITE: "json_lists",
    ToolFormat.PHI4_MINI_JSON: "json_lists",
    ToolFormat.HUNYUAN_A13B: "json_lists",
    ToolFormat.NEMOTRON_JSON: "json_lists",
    ToolFormat.COHERE_COMMAND3: "json_lists",
    ToolFormat.GLM45: "xml_calls",
    ToolFormat.QWEN3_CODER: "xml_calls",
    ToolFormat.SEED_OSS: "xml_calls",
    ToolFormat.MINIMAX_M2: "xml_calls",
    ToolFormat.PYTHONIC: "pythonic",
    ToolFormat.FUNCTIONGEMMA: "pythonic",
    ToolFormat.GEMMA4: "pythonic",
    ToolFormat.OPENAI: "harmony",
    ToolFormat.TEXT: "formats",
}


def family_of(tool_format: ToolFormat) -> Family:
    """Returns the parser of a format's calls."""
    families: Mapping[ToolFormat, Family] = load_part(FAMILIES[tool_format]).FAMILIES
    return families[tool_format]


def new_parser(config: ParserConfig, seed: str, choice: int) -> FormatParser:
    """Returns the parser of one choice; the ids of its calls derive from `seed` and its number, or
    are random without one."""
    seed = seed or random_seed()
    tools = CallableTools(config.names, lambda call: call_id(seed, choice, call), config.types)
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
