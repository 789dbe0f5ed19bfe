"""ChatDialect: events of a job as `chat.completion.chunk`s, or as one `chat.completion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from api.dialect import usage_payload
from api.openai.answer import AnswerFacts, ChoiceAnswer, ChoiceEnd, OpenAIAnswer
from api.openai.logprobs import PlacedLogprob, chat_logprobs
from api.turn.events import Reasoning, Text, ToolArguments, ToolCall, TurnEvent
from api.turn.parser import NewParser, PlainParser, TurnParser
from api.turn.reasoning_tokens import ReasoningTokens
from shared.messages import Delta, FinishReason, Usage, choice_deltas
from shared.text.base import Tokenizer

CALLED = "tool_calls"  # the finish reason of a choice that made calls


class ChatDialect(OpenAIAnswer):
    """`new_parser` makes the parser of each choice's text; `counts_reasoning` where it may find
    some."""

    kind = "chat"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        facts: AnswerFacts,
        tokenizer: Tokenizer,
        new_parser: NewParser = PlainParser,
        *,
        counts_reasoning: bool = False,
    ) -> None:
        super().__init__(facts, tokenizer)
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

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(placed, self._tokenizer)

    def _said(self, choice: ChoiceAnswer, text: str) -> Iterable[dict[str, Any]]:
        return self._members(choice, self._parsers[choice.index].push(text))

    def _ended(self, choice: ChoiceAnswer, end: ChoiceEnd) -> Iterable[dict[str, Any]]:
        parser = self._parsers[choice.index]
        yield from self._members(choice, parser.finish())
        yield self._choice(choice, {"delta": {}}, _end(end, parser))

    def _members(
        self, choice: ChoiceAnswer, events: Sequence[TurnEvent]
    ) -> Iterable[dict[str, Any]]:
        for event in events:
            is_text = isinstance(event, Text)
            yield self._choice(choice, {"delta": _delta(event)}, is_text=is_text)

    def _whole(self, choice: ChoiceAnswer, end: ChoiceEnd) -> dict[str, Any]:
        parser = self._parsers[choice.index]
        events = [*parser.push("".join(choice.texts)), *parser.finish()]
        return self._choice(choice, {"message": _message(events)}, _end(end, parser))


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


def _message(events: Sequence[TurnEvent]) -> dict[str, Any]:
    """The content is null where there are calls and no text."""
    text = "".join(event.text for event in events if isinstance(event, Text))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = [event for event in events if isinstance(event, ToolCall)]
    arguments = ["" for _ in calls]
    for event in events:
        if isinstance(event, ToolArguments):
            arguments[event.index] += event.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call, arguments[call.index]) for call in calls]
    return message
