"""The two OpenAI dialects: events of a job to chunks, or to one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.dialect import usage_payload
from api.errors import ApiError
from api.openai.logprobs import (
    LogprobAligner,
    PlacedLogprob,
    chat_logprobs,
    completion_logprobs,
)
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


class _OpenAIDialect:
    """What both dialects share: holding back what has no text yet."""

    kind: str
    chunk_object: str
    whole_object: str

    def __init__(self, facts: AnswerFacts, tokenizer: Tokenizer) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._aligner = None if facts.num_logprobs is None else LogprobAligner(tokenizer)
        self._token_ids: list[int] = []  # not shown yet; all of them in a whole answer
        self._placed: list[PlacedLogprob] = []
        self._texts: list[str] = []

    def delta(self, delta: Delta) -> Sequence[Any]:
        self._hold(delta)
        if not delta.text:
            return ()
        return (self._chunk([self._choice(self._text_member(delta.text), None)]),)

    def finished(self, end: Finished) -> Sequence[Any]:
        self._hold_rest(end)
        last = self._choice(self._end_member(), end)
        chunks = [self._chunk([last])]
        if self._facts.include_usage:
            chunks.append({**self._chunk([]), "usage": usage_payload(end.usage)})
        return chunks

    def failed(self, error: ApiError) -> Any:
        return error.body()

    def collect(self, delta: Delta) -> None:
        self._hold(delta)
        self._texts.append(delta.text)

    def whole(self, end: Finished) -> Any:
        self._hold_rest(end)
        answer = {
            "id": self._facts.id,
            "object": self.whole_object,
            "created": self._facts.created_s,
            "model": self._facts.model,
            "choices": [self._choice(self._whole_member("".join(self._texts)), end)],
            "usage": usage_payload(end.usage),
        }
        if self._facts.prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._facts.prompt_token_ids
        return answer

    def _hold(self, delta: Delta) -> None:
        if self._facts.prompt_token_ids is not None:
            self._token_ids.extend(delta.token_ids)
        if self._aligner is not None:
            self._placed.extend(self._aligner.push(delta))

    def _hold_rest(self, end: Finished) -> None:
        if self._aligner is not None:
            stopped = end.reason is FinishReason.STOP
            self._placed.extend(self._aligner.rest(end.end.num_bytes, stopped=stopped))

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

    def _choice(self, member: dict[str, Any], end: Finished | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            **member,
            "logprobs": self._logprobs(self._placed),
            "finish_reason": None if end is None else end.reason.value,
        }
        self._placed = []
        if end is not None and end.stop_reason is not None:
            choice["stop_reason"] = end.stop_reason
        if self._facts.prompt_token_ids is not None:
            choice["token_ids"] = self._token_ids
            self._token_ids = []
        return choice

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _text_member(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _end_member(self) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_member(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatDialect(_OpenAIDialect):
    """`chat.completion` and `chat.completion.chunk`."""

    kind = "chat"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> Sequence[Any]:
        chunk = self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])
        if self._facts.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._facts.prompt_token_ids
        return (chunk,)

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(placed, self._tokenizer)

    def _text_member(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _end_member(self) -> dict[str, Any]:
        return {"delta": {}}

    def _whole_member(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionDialect(_OpenAIDialect):
    """`text_completion`, in chunks and whole."""

    kind = "completion"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self) -> Sequence[Any]:
        if self._facts.prompt_token_ids is None:
            return ()
        chunk = self._chunk([self._choice({"text": ""}, None)])
        return ({**chunk, "prompt_token_ids": self._facts.prompt_token_ids},)

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        return completion_logprobs(placed, self._tokenizer, self._facts.num_logprobs or 0)

    def _text_member(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _end_member(self) -> dict[str, Any]:
        return {"text": ""}

    def _whole_member(self, text: str) -> dict[str, Any]:
        return {"text": text}
