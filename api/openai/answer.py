"""OpenAIAnswer: what the chat and the completion dialect share, choice by choice.

A choice's text is told in chunks or as a whole; token ids and log probabilities are held back until
the text of their tokens is out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from api.dialect import usage_payload
from api.errors import ApiError
from api.openai.logprobs import LogprobAligner, PlacedLogprob
from api.sse import PLAIN
from shared.messages import Delta, Finished, FinishReason
from shared.text.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What every chunk of an answer repeats, and what the caller asked to see."""

    id: str  # public id
    model: str
    created_s: int
    include_usage: bool = False
    num_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # given: show token ids


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How a choice ended, in the API's words."""

    finish_reason: str
    stop_reason: str | int | None = None


class ChoiceAnswer:
    """One choice in the making: what is known of it and not shown yet."""

    def __init__(self, index: int, facts: AnswerFacts, tokenizer: Tokenizer) -> None:
        self.index = index
        self.texts: list[str] = []  # all of it; collected for whole answers only
        self._shows_token_ids = facts.prompt_token_ids is not None
        self._token_ids: list[int] = []
        self._aligner = None if facts.num_logprobs is None else LogprobAligner(tokenizer)
        self._placed: list[PlacedLogprob] = []

    def take(self, delta: Delta) -> None:
        """New tokens of this choice."""
        if self._shows_token_ids:
            self._token_ids.extend(delta.token_ids)
        if self._aligner is not None:
            self._placed.extend(self._aligner.push(delta))

    def end(self, num_bytes: int, *, stopped: bool) -> None:
        """Its text is over, after `num_bytes` of it."""
        if self._aligner is not None:
            self._placed.extend(self._aligner.rest(num_bytes, stopped=stopped))

    def take_token_ids(self) -> list[int] | None:
        """Those not shown yet; None when none are to be shown."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids if self._shows_token_ids else None

    def take_placed(self) -> list[PlacedLogprob]:
        placed, self._placed = self._placed, []
        return placed


class OpenAIAnswer:
    """Base of the two dialects. A subclass says what a choice's text looks like."""

    kind: str
    framing = PLAIN
    chunk_object: str
    whole_object: str

    def __init__(self, facts: AnswerFacts, tokenizer: Tokenizer) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._choices = [ChoiceAnswer(0, facts, tokenizer)]

    def opening(self) -> Sequence[Any]:
        raise NotImplementedError

    def delta(self, delta: Delta) -> Sequence[Any]:
        choice = self._choices[0]
        choice.take(delta)
        if not delta.text:
            return ()
        return [self._chunk([member]) for member in self._said(choice, delta.text)]

    def finished(self, end: Finished) -> Sequence[Any]:
        choice = self._choices[0]
        choice.end(end.end.num_bytes, stopped=end.reason is FinishReason.STOP)
        chunks = [self._chunk([member]) for member in self._ended(choice, end)]
        if self._facts.include_usage:
            chunks.append({**self._chunk([]), "usage": usage_payload(end.usage)})
        return chunks

    def failed(self, error: ApiError) -> Any:
        return error.body()

    def collect(self, delta: Delta) -> None:
        choice = self._choices[0]
        choice.take(delta)
        choice.texts.append(delta.text)

    def whole(self, end: Finished) -> Any:
        choice = self._choices[0]
        choice.end(end.end.num_bytes, stopped=end.reason is FinishReason.STOP)
        answer = {
            "id": self._facts.id,
            "object": self.whole_object,
            "created": self._facts.created_s,
            "model": self._facts.model,
            "choices": [self._whole(choice, end)],
            "usage": usage_payload(end.usage),
        }
        if self._facts.prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._facts.prompt_token_ids
        return answer

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {
            "id": self._facts.id,
            "object": self.chunk_object,
            "created": self._facts.created_s,
            "model": self._facts.model,
            "choices": choices,
        }
        if self._facts.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self, choice: ChoiceAnswer, member: dict[str, Any], end: ChoiceEnd | None = None
    ) -> dict[str, Any]:
        """A member of `choices`, with everything of it that can be shown by now."""
        said = {
            "index": choice.index,
            **member,
            "logprobs": self._logprobs(choice.take_placed()),
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None and end.stop_reason is not None:
            said["stop_reason"] = end.stop_reason
        token_ids = choice.take_token_ids()
        if token_ids is not None:
            said["token_ids"] = token_ids
        return said

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _said(self, choice: ChoiceAnswer, text: str) -> Iterable[dict[str, Any]]:
        """Members of `choices` for new text, one per chunk."""
        raise NotImplementedError

    def _ended(self, choice: ChoiceAnswer, end: Finished) -> Iterable[dict[str, Any]]:
        """The last members of `choices`, one per chunk."""
        raise NotImplementedError

    def _whole(self, choice: ChoiceAnswer, end: Finished) -> dict[str, Any]:
        """The one member of `choices` of an answer that was not streamed."""
        raise NotImplementedError
