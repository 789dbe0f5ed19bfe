"""ChatFormatter: events of a job as `chat.completion.chunk`s, or as one `chat.completion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.generation.choices import (
    ChoiceAnswer,
    ChoiceEnd,
    OpenAIAnswer,
    ReasoningTokens,
    ResponseContext,
)
from api.generation.formatter import usage_payload
from api.generation.logprobs import ChatEntryForm, ChatLogprobs, PlacedLogprob, chat_logprobs
from api.generation.prompt_logprobs import PromptLogprobs
from api.output_parsers.events import Reasoning, Text, ToolArguments, ToolCall, TurnEvent
from api.output_parsers.parser import NewParser, PlainParser, TurnParser
from shared.choice_deltas import choice_deltas
from shared.messages import Delta, Finished, FinishReason, Usage
from shared.text.base import Tokenizer

CALLED = "tool_calls"  # the finish reason of a choice that made calls
TEXTS_AT_ONCE = 64  # that are read together, where no reader waits for them

Choice = ChoiceAnswer[msgspec.Raw]


class ChatFormatter(OpenAIAnswer[msgspec.Raw]):
    """`new_parser` makes the parser of each choice's text; `counts_reasoning` where it may find
    some."""

    kind = "chat"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        facts: ResponseContext,
        tokenizer: Tokenizer,
        new_parser: NewParser = PlainParser,
        *,
        counts_reasoning: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        super().__init__(facts, tokenizer, ChatEntryForm(tokenizer))
        self._prompt_logprobs = prompt_logprobs  # of whole answers
        self._texts: list[list[str]] = [[] for _ in self._choices]  # collected and not read yet
        self._messages = [WholeMessage() for _ in self._choices]  # of whole answers
        self._contents: list[list[msgspec.Raw]] = [[] for _ in self._choices]  # of their logprobs
        self._parsers = [new_parser() for _ in self._choices]
        self._counters = [ReasoningTokens(tokenizer) for _ in self._choices if counts_reasoning]
        for choice, parser in zip(self._choices, self._parsers, strict=True):
            choice.spans = parser.spans

    def opening(self) -> Sequence[Any]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        chunk = self._chunk([self._choice(choice, dict(delta)) for choice in self._choices])
        if self._facts.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._facts.prompt_token_ids
        return (chunk,)

    def delta(self, delta: Delta) -> Sequence[Any]:
        self._count_reasoning(delta)
        return super().delta(delta)

    def collect(self, delta: Delta) -> None:
        self._count_reasoning(delta)
        super().collect(delta)

    def _count_reasoning(self, delta: Delta) -> None:
        if not self._counters:
            return
        for part in choice_deltas(delta):
            self._counters[part.choice].push(part.token_ids)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        counted = zip(self._counters, self._parsers, strict=False)
        return usage_payload(
            usage, sum(counter.count(parser.reasoning_bytes) for counter, parser in counted)
        )

    def _logprobs(self, placed: Sequence[PlacedLogprob[msgspec.Raw]]) -> ChatLogprobs | None:
        return chat_logprobs([item.entry for item in placed]) if placed else None

    def _collect(self, choice: Choice, text: str) -> None:
        texts = self._texts[choice.index]
        texts.append(text)
        if len(texts) >= TEXTS_AT_ONCE:
            self._read(choice)

    def _read(self, choice: Choice) -> None:
        """Reads what was collected. The entries of a choice that has ended wait for its last."""
        texts = self._texts[choice.index]
        self._messages[choice.index].take(self._parsers[choice.index].push("".join(texts)))
        texts.clear()
        if self._facts.num_logprobs is not None and choice.ending is None:
            self._read_logprobs(choice)

    def _read_logprobs(self, choice: Choice) -> None:
        self._contents[choice.index] += [item.entry for item in choice.take_placed()]

    def _said(self, choice: Choice, text: str) -> Iterable[dict[str, Any]]:
        return self._members(choice, self._parsers[choice.index].push(text))

    def _ended(self, choice: Choice, end: ChoiceEnd) -> Iterable[dict[str, Any]]:
        parser = self._parsers[choice.index]
        yield from self._members(choice, parser.finish())
        yield self._choice(choice, {"delta": {}}, _end(end, parser))

    def _members(self, choice: Choice, events: Sequence[TurnEvent]) -> Iterable[dict[str, Any]]:
        for event in events:
            is_text = isinstance(event, Text)
            yield self._choice(choice, {"delta": _delta(event)}, is_text=is_text)

    def whole(self, end: Finished) -> Any:
        answer = super().whole(end)
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs.payload()
        return answer

    def _whole(self, choice: Choice, end: ChoiceEnd) -> dict[str, Any]:
        parser, message = self._parsers[choice.index], self._messages[choice.index]
        self._read(choice)
        message.take(parser.finish())
        self._read_logprobs(choice)
        member = {"message": message.payload()}
        logprobs = chat_logprobs(self._contents[choice.index])
        return {**self._choice(choice, member, _end(end, parser)), "logprobs": logprobs}


def _end(end: ChoiceEnd, parser: TurnParser) -> ChoiceEnd:
    """A choice that was cut off says so, whatever it was about to call."""
    called = parser.has_calls and end.finish_reason == FinishReason.STOP.value
    return ChoiceEnd(CALLED, end.stop_reason) if called else end


def _delta(event: TurnEvent) -> dict[str, Any]:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {"tool_calls": [{"index": event.index, **_call(event, "")}]}


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


class WholeMessage:
    """The message of a choice whose events are taken as they come."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []  # of each call

    def take(self, events: Sequence[TurnEvent]) -> None:
        """Keeps what these events add."""
        for event in events:
            match event:
                case Text(text):
                    self._text.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCall():
                    self._calls.append(event)
                    self._arguments.append([])
                case ToolArguments(index, text):
                    self._arguments[index].append(text)

    def payload(self) -> dict[str, Any]:
        """The member `message`. Its content is null where there are calls and no text."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                _call(call, "".join(parts))
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return message
