"""OutputParserFactory: makes the parsers of a request's choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from api.ids import call_id, random_seed
from api.output_parsers.events import Reading, Source
from api.output_parsers.formats import (
    THINK_CLOSE,
    THINK_OPEN,
    hermes_calls,
    llama3_json_calls,
    plain_text,
    reasoning_first,
)
from api.output_parsers.parser import FormatParser, OutputParser, PlainParser
from api.output_parsers.tool_calls import CallableTools
from shared.text.tool_formats import ReasoningFormat, ToolFormat

CALL_PARSERS: Mapping[ToolFormat, Callable[[Source, CallableTools], Reading]] = {
    ToolFormat.HERMES: hermes_calls,
    ToolFormat.LLAMA3_JSON: llama3_json_calls,
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
    end = prompt[-200:].rstrip()
    if end.endswith(THINK_OPEN):
        return Thinking.OPEN
    return Thinking.NO if end.endswith(THINK_CLOSE) else Thinking.MAYBE


@dataclass(slots=True)
class OutputParserFactory:
    """A NewParser: called once for each choice, in their order.

    `names`: the tools that may be called; calls of others are text. `seed`: the ids of the calls
    derive from it; the same seed gives the same ids.
    """

    tool_format: ToolFormat | None = None
    names: Collection[str] = ()
    reasoning_format: ReasoningFormat | None = None
    thinking: Thinking = Thinking.NO
    seed: str = field(default_factory=random_seed)
    _choices: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> OutputParser:
        choice = next(self._choices)
        if self.reasoning_format is None and not (self.tool_format and self.names):
            return PlainParser()
        tools = CallableTools(self.names, lambda call: call_id(self.seed, choice, call))
        return FormatParser(lambda source: self._read(source, tools))

    def _read(self, source: Source, tools: CallableTools) -> Reading:
        if self.reasoning_format is ReasoningFormat.THINK:
            yield from reasoning_first(source, is_open=self.thinking is Thinking.OPEN)
        if not tools.names or self.tool_format is None:
            yield from plain_text(source)
        else:
            yield from CALL_PARSERS[self.tool_format](source, tools)
