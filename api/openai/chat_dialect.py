"""ChatDialect: events of a job as `chat.completion.chunk`s, or as one `chat.completion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from api.openai.answer import AnswerFacts, ChoiceAnswer, ChoiceEnd, OpenAIAnswer
from api.openai.logprobs import PlacedLogprob, chat_logprobs
from api.turn.events import Text, TurnEvent
from api.turn.parser import NewParser, PlainParser
from shared.messages import Finished
from shared.text.base import Tokenizer


class ChatDialect(OpenAIAnswer):
    """`new_parser` makes the parser of each choice's text."""

    kind = "chat"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self, facts: AnswerFacts, tokenizer: Tokenizer, new_parser: NewParser = PlainParser
    ) -> None:
        super().__init__(facts, tokenizer)
        self._parsers = [new_parser() for _ in self._choices]

    def opening(self) -> Sequence[Any]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        chunk = self._chunk([self._choice(choice, dict(delta)) for choice in self._choices])
        if self._facts.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._facts.prompt_token_ids
        return (chunk,)

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(placed, self._tokenizer)

    def _said(self, choice: ChoiceAnswer, text: str) -> Iterable[dict[str, Any]]:
        return self._members(choice, self._parsers[choice.index].push(text))

    def _ended(self, choice: ChoiceAnswer, end: Finished) -> Iterable[dict[str, Any]]:
        yield from self._members(choice, self._parsers[choice.index].finish())
        yield self._choice(choice, {"delta": {}}, _end_of(end))

    def _members(
        self, choice: ChoiceAnswer, events: Sequence[TurnEvent]
    ) -> Iterable[dict[str, Any]]:
        for event in events:
            assert isinstance(event, Text)
            yield self._choice(choice, {"delta": {"content": event.text}})

    def _whole(self, choice: ChoiceAnswer, end: Finished) -> dict[str, Any]:
        text = "".join(choice.texts)
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(choice, {"message": message}, _end_of(end))


def _end_of(end: Finished) -> ChoiceEnd:
    return ChoiceEnd(end.reason.value, end.stop_reason)
