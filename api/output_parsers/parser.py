"""OutputParser: parses a choice's text into events while it arrives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from api.ids import call_id, random_seed
from api.output_parsers.events import (
    OutputEvent,
    Reading,
    Source,
    Text,
    TextSpans,
    ToolArguments,
    ToolCall,
)
from api.output_parsers.formats import (
    hermes_calls,
    llama3_json_calls,
    plain_text,
    reasoning_first,
)
from api.output_parsers.harmony import harmony
from api.output_parsers.json_lists import (
    cohere_command3_calls,
    granite_calls,
    hunyuan_a13b_calls,
    nemotron_json_calls,
    phi4_mini_json_calls,
)
from api.output_parsers.named_calls import (
    DEEPSEEK_OPEN,
    KIMI_OPEN,
    MISTRAL_OPEN,
    deepseek_calls,
    kimi_k2_calls,
    mistral_calls,
)
from api.output_parsers.pythonic import functiongemma_calls, gemma4_calls, pythonic_calls
from api.output_parsers.tool_calls import CallableTools
from api.output_parsers.typed_values import Types
from api.output_parsers.xml_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    deepseek_v4_calls,
    deepseek_v32_calls,
    deepseek_v41_calls,
    glm45_calls,
    minimax_m2_calls,
    qwen3_coder_calls,
    seed_oss_calls,
)
from shared.text.tool_formats import REASONING_MARKERS, ReasoningFormat, ToolFormat

SLICE_CHARS = 1024  # parsed at a time: taking from the front copies what is behind


class OutputParser(Protocol):
    """Parses one choice. How its text is split into pushes changes no content."""

    @property
    def has_calls(self) -> bool:
        """Returns whether a tool call has begun."""
        ...

    @property
    def reasoning_bytes(self) -> int:
        """Returns how many UTF-8 bytes of the raw text are reasoning so far, markers included."""
        ...

    @property
    def spans(self) -> TextSpans | None:
        """Returns the ranges of raw text that are text of the output; None: all of it."""
        ...

    def push(self, text: str) -> Sequence[OutputEvent]:
        """Returns the events that `text` completes; holds back what may become a marker."""
        ...

    def finish(self) -> Sequence[OutputEvent]:
        """Returns the last events. Nothing is pushed afterwards."""
        ...


class PlainParser:
    """Passes all text on as the answer."""

    has_calls = False
    reasoning_bytes = 0
    spans = None

    def push(self, text: str) -> Sequence[OutputEvent]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[OutputEvent]:
        return ()


class FormatParser:
    """Runs a format of `api.output_parsers.formats`. Never raises, whatever the text is."""

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
    """Returns what consecutive pieces of the same text have in common."""
    return type(event), event.index if isinstance(event, ToolCall | ToolArguments) else 0


NewParser = Callable[[], OutputParser]

CALL_PARSERS: Mapping[ToolFormat, Callable[[Source, CallableTools], Reading]] = {
    ToolFormat.HERMES: hermes_calls,
    ToolFormat.LLAMA3_JSON: llama3_json_calls,
    ToolFormat.MISTRAL: mistral_calls,
    ToolFormat.DEEPSEEK_V3: deepseek_calls,
    ToolFormat.DEEPSEEK_V31: deepseek_calls,
    ToolFormat.DEEPSEEK_V32: deepseek_v32_calls,
    ToolFormat.DEEPSEEK_V4: deepseek_v4_calls,
    ToolFormat.DEEPSEEK_V41: deepseek_v41_calls,
    ToolFormat.KIMI_K2: kimi_k2_calls,
    ToolFormat.GRANITE: granite_calls,
    ToolFormat.PHI4_MINI_JSON: phi4_mini_json_calls,
    ToolFormat.HUNYUAN_A13B: hunyuan_a13b_calls,
    ToolFormat.NEMOTRON_JSON: nemotron_json_calls,
    ToolFormat.COHERE_COMMAND3: cohere_command3_calls,
    ToolFormat.GLM45: glm45_calls,
    ToolFormat.QWEN3_CODER: qwen3_coder_calls,
    ToolFormat.SEED_OSS: seed_oss_calls,
    ToolFormat.MINIMAX_M2: minimax_m2_calls,
    ToolFormat.PYTHONIC: pythonic_calls,
    ToolFormat.FUNCTIONGEMMA: functiongemma_calls,
    ToolFormat.GEMMA4: gemma4_calls,
    ToolFormat.OPENAI: harmony,
    ToolFormat.TEXT: lambda source, tools: plain_text(source),
}


# Calls that models also write before they have closed their reasoning. A marker of these formats is
# or contains a special token, which reasoning text about a call does not contain.
ENDS_OF_REASONING: Mapping[ToolFormat | None, tuple[str, ...]] = {
    ToolFormat.MISTRAL: (MISTRAL_OPEN,),
    ToolFormat.DEEPSEEK_V3: (DEEPSEEK_OPEN,),
    ToolFormat.DEEPSEEK_V31: (DEEPSEEK_OPEN,),
    ToolFormat.DEEPSEEK_V32: (DEEPSEEK_V32.opening,),
    ToolFormat.DEEPSEEK_V4: (DEEPSEEK_V4.opening,),
    ToolFormat.DEEPSEEK_V41: (DEEPSEEK_V41.opening,),
    ToolFormat.KIMI_K2: (KIMI_OPEN,),
}


class Thinking(Enum):
    """Whether generated text begins with reasoning, as the prompt leaves it."""

    NO = "no"  # the model writes none, or the prompt has closed it
    MAYBE = "maybe"  # the text may begin with it
    OPEN = "open"  # the prompt has opened it


def thinking_after(prompt: str, reasoning_format: ReasoningFormat | None) -> Thinking:
    """Returns how text of a model with this format begins, by the end of the prompt."""
    if reasoning_format is None:
        return Thinking.NO
    opening, closing = REASONING_MARKERS[reasoning_format]
    end = prompt[-200:].rstrip()
    if end.endswith(opening):
        return Thinking.OPEN
    return Thinking.NO if end.endswith(closing) else Thinking.MAYBE


class ParserConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a parser must know of a request and its model. `names`: the tools that may be called;
    calls of others are text; `types`: those of their parameters, where the format needs them."""

    tool_format: ToolFormat | None = None
    names: tuple[str, ...] = ()
    types: dict[str, dict[str, Types]] = {}
    reasoning_format: ReasoningFormat | None = None
    thinking: Thinking = Thinking.NO


@dataclass(slots=True)
class OutputParserFactory:
    """A NewParser: called once for each choice, in their order.

    `seed`: the ids of the calls derive from it; the same seed gives the same ids.
    """

    config: ParserConfig
    seed: str = field(default_factory=random_seed)
    _choices: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> OutputParser:
        choice, config = next(self._choices), self.config
        has_calls = bool(config.names) or config.tool_format is ToolFormat.OPENAI
        if config.reasoning_format is None and not (config.tool_format and has_calls):
            return PlainParser()
        tools = CallableTools(
            config.names, lambda call: call_id(self.seed, choice, call), config.types
        )
        return FormatParser(lambda source: _read(source, tools, config))


def _read(source: Source, tools: CallableTools, config: ParserConfig) -> Reading:
    if config.reasoning_format is ReasoningFormat.OPENAI or config.tool_format is ToolFormat.OPENAI:
        yield from harmony(source, tools, is_open=config.thinking is Thinking.OPEN)
        return
    if config.reasoning_format is not None:
        is_open = config.thinking is Thinking.OPEN
        ends = ENDS_OF_REASONING.get(config.tool_format, ()) if tools.names else ()
        yield from reasoning_first(source, config.reasoning_format, is_open=is_open, ends=ends)
    if not tools.names or config.tool_format is None:
        yield from plain_text(source)
    else:
        yield from CALL_PARSERS[config.tool_format](source, tools)
