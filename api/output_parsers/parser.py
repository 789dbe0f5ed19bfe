"""OutputParser: parses a choice's text into events while it arrives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
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
    COHERE_CLOSE,
    COHERE_OPEN,
    GRANITE_CLOSE,
    GRANITE_OPEN,
    HUNYUAN_CLOSE,
    HUNYUAN_OPEN,
    NEMOTRON_CLOSE,
    NEMOTRON_OPEN,
    PHI4_OPEN,
    list_calls,
)
from api.output_parsers.named_calls import (
    DEEPSEEK,
    KIMI_K2,
    MISTRAL_OPEN,
    mistral_calls,
    section_calls,
)
from api.output_parsers.pythonic import (
    FUNCTIONGEMMA,
    FUNCTIONGEMMA_CLOSE,
    FUNCTIONGEMMA_OPEN,
    GEMMA4,
    GEMMA4_CLOSE,
    GEMMA4_OPEN,
    gemma_calls,
    pythonic_calls,
)
from api.output_parsers.tool_calls import CallableTools
from api.output_parsers.typed_values import Types
from api.output_parsers.xml_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    GLM,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    tagged_calls,
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
    ToolFormat.DEEPSEEK_V3: partial(section_calls, section=DEEPSEEK),
    ToolFormat.DEEPSEEK_V31: partial(section_calls, section=DEEPSEEK),
    ToolFormat.DEEPSEEK_V32: partial(tagged_calls, markup=DEEPSEEK_V32),
    ToolFormat.DEEPSEEK_V4: partial(tagged_calls, markup=DEEPSEEK_V4),
    ToolFormat.DEEPSEEK_V41: partial(tagged_calls, markup=DEEPSEEK_V41),
    ToolFormat.KIMI_K2: partial(section_calls, section=KIMI_K2),
    ToolFormat.GRANITE: partial(list_calls, openings=GRANITE_OPEN, closing=GRANITE_CLOSE),
    ToolFormat.PHI4_MINI_JSON: partial(list_calls, openings=(PHI4_OPEN,), closing=None),
    ToolFormat.HUNYUAN_A13B: partial(list_calls, openings=(HUNYUAN_OPEN,), closing=HUNYUAN_CLOSE),
    ToolFormat.NEMOTRON_JSON: partial(
        list_calls, openings=(NEMOTRON_OPEN,), closing=NEMOTRON_CLOSE
    ),
    ToolFormat.COHERE_COMMAND3: partial(list_calls, openings=(COHERE_OPEN,), closing=COHERE_CLOSE),
    ToolFormat.GLM45: partial(tagged_calls, markup=GLM),
    ToolFormat.QWEN3_CODER: partial(tagged_calls, markup=QWEN3_CODER),
    ToolFormat.SEED_OSS: partial(tagged_calls, markup=SEED_OSS),
    ToolFormat.MINIMAX_M2: partial(tagged_calls, markup=MINIMAX_M2),
    ToolFormat.PYTHONIC: pythonic_calls,
    ToolFormat.FUNCTIONGEMMA: partial(
        gemma_calls,
        opening=FUNCTIONGEMMA_OPEN,
        closing=FUNCTIONGEMMA_CLOSE,
        syntax=FUNCTIONGEMMA,
    ),
    ToolFormat.GEMMA4: partial(
        gemma_calls, opening=GEMMA4_OPEN, closing=GEMMA4_CLOSE, syntax=GEMMA4
    ),
    ToolFormat.OPENAI: harmony,
    ToolFormat.TEXT: lambda source, tools: plain_text(source),
}


# Calls that models also write before they have closed their reasoning. A marker of these formats is
# or contains a special token, which reasoning text about a call does not contain.
ENDS_OF_REASONING: Mapping[ToolFormat | None, tuple[str, ...]] = {
    ToolFormat.MISTRAL: (MISTRAL_OPEN,),
    ToolFormat.DEEPSEEK_V3: (DEEPSEEK.opening, DEEPSEEK.call_tag),
    ToolFormat.DEEPSEEK_V31: (DEEPSEEK.opening, DEEPSEEK.call_tag),
    ToolFormat.DEEPSEEK_V32: (DEEPSEEK_V32.opening, DEEPSEEK_V32.name[0]),
    ToolFormat.DEEPSEEK_V4: (DEEPSEEK_V4.opening, DEEPSEEK_V4.name[0]),
    ToolFormat.DEEPSEEK_V41: (DEEPSEEK_V41.opening, DEEPSEEK_V41.name[0]),
    ToolFormat.KIMI_K2: (KIMI_K2.opening, KIMI_K2.call_tag),
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
