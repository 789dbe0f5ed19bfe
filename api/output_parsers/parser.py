"""OutputParser: parses a choice's text into events while it arrives.

Text without reasoning and tool calls needs no more than this file. The formats of these are loaded
by name: `api.output_parsers.format_parser`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from api.ids import random_seed
from api.on_demand import load_part
from api.output_parsers.events import OutputEvent, Text, TextSpans
from shared.text.tool_formats import REASONING_MARKERS, ReasoningFormat, ToolFormat

Types = tuple[str, ...]  # JSON schema's names of types; (): any


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


NewParser = Callable[[], OutputParser]


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
        parser: OutputParser = load_part("format_parser").new_parser(config, self.seed, choice)
        return parser
