"""OutputParserFactory: makes the parsers of a response's choices.

The formats of reasoning and tool calls are loaded by name: `api.output_parsers.format_parser`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from api.on_demand import load_part
from api.output_parsers.events import OutputParser, PlainParser
from shared.text.tool_formats import REASONING_MARKERS, ReasoningFormat, ToolFormat

Types = tuple[str, ...]  # JSON schema's names of types; (): any


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
    seed: str = ""
    _choices: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> OutputParser:
        choice, config = next(self._choices), self.config
        has_calls = bool(config.names) or config.tool_format is ToolFormat.OPENAI
        if config.reasoning_format is None and not (config.tool_format and has_calls):
            return PlainParser()
        parser: OutputParser = load_part("format_parser").new_parser(config, self.seed, choice)
        return parser
