"""A tiny model's text side, and random outputs that follow a grammar of its turns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_input
from api.generation.parameters import parameter_types
from api.generation.tools import ToolUse
from api.generation.validation import parse_request
from api.output_parsers.events import OutputEvent, ToolArguments, ToolCall
from api.output_parsers.format_parser import merged
from api.output_parsers.parser import OutputParserFactory, ParserConfig, Thinking
from shared.messages import Grammar
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.model_card import ModelCard, TextModel
from shared.text.text_model import load_text
from shared.text.tool_formats import ToolFormat, reasoning_format_of
from tests.support.checkpoints import card_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"$ref": "#/$defs/days"},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "put",
            "parameters": {
                "type": "object",
                "properties": {
                    "rows": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
                        "maxItems": 2,
                    },
                    "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
                },
                "required": ["rows", "note"],
                "additionalProperties": False,
            },
        },
    },
]
NO_PARAMETERS = {"type": "object", "maxProperties": 0}


def tool_use(tools: list[Any], choice: Any, parallel: bool) -> ToolUse:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }
    return chat_input(parse_request(body, ChatRequest)).tool_use


SCHEMAS = {
    tool["function"]["name"]: tool["function"].get("parameters", NO_PARAMETERS) for tool in TOOLS
}
MAX_TOKENS = 1200


class Model:
    """A tiny model's text side, and random outputs that follow a grammar."""

    def __init__(self, make: Callable[..., Path], path: Path) -> None:
        self.card: ModelCard
        self.card, blobs = card_of(make(path))
        self.text: TextModel = load_text(self.card, blobs)
        self.form = ToolFormat(self.card.tool_format or "")
        self.compiler = GrammarCompiler(
            self.text.tokenizer, self.card.vocab_size, self.card.eos_token_ids
        )

    def token_id(self, token: str) -> int | None:
        return self.text.tokenizer.token_id(token)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = self.compiler.matcher(grammar)
        token_ids = self.text.tokenizer.encode(text)
        return matcher.validate_tokens(token_ids) == len(token_ids) and (
            matcher.consume_tokens(token_ids) and matcher.is_accepting()
        )

    def sample(self, grammar: Grammar, seed: int) -> tuple[str, bool]:
        """(text, whether it ended by itself)."""
        rng = random.Random(seed)
        matcher = self.compiler.matcher(grammar)
        token_ids: list[int] = []
        while len(token_ids) < MAX_TOKENS:
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
            ends = [i for i in self.card.eos_token_ids if i in allowed]
            if ends and rng.random() < 0.2:
                return self.text.tokenizer.decode(token_ids), True
            # An end of a string or a list is likelier than among all tokens.
            short = [i for i in allowed if len(self.text.tokenizer.token_bytes(int(i))) == 1]
            token_id = int(rng.choice(short if short and rng.random() < 0.5 else list(allowed)))
            if token_id in self.card.eos_token_ids:
                return self.text.tokenizer.decode(token_ids), True
            assert matcher.consume_token(token_id), matcher.get_error()
            token_ids.append(token_id)
        return self.text.tokenizer.decode(token_ids), False

    def read(self, text: str, use: ToolUse, thinking: Thinking) -> list[OutputEvent]:
        reasoning_format = reasoning_format_of(self.card.reasoning_format)
        config = ParserConfig(
            tool_format=self.form,
            names=tuple(tool.name for tool in use.callable),
            types={tool.name: parameter_types(tool) for tool in use.callable},
            reasoning_format=None if thinking is Thinking.NO else reasoning_format,
            thinking=thinking,
        )
        parser = OutputParserFactory(config)()
        return merged([*parser.push(text), *parser.finish()])


def checked_calls(events: list[OutputEvent]) -> list[str]:
    """Names of the calls, whose arguments were found valid."""
    names = {event.index: event.name for event in events if isinstance(event, ToolCall)}
    for event in events:
        if isinstance(event, ToolArguments):
            jsonschema.validate(json.loads(event.text), SCHEMAS[names[event.index]])
    return list(names.values())
