"""OpenAIAnswer: what the chat and the completion dialect share, choice by choice.

A choice's text is told in chunks or as a whole; token ids and log probabilities are held back until
the text of their tokens is out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from api.errors import ApiError
from api.generation.formatter import Formatter, usage_payload
from api.generation.logprobs import EntryForm, EntryT, LogprobAligner, PlacedLogprob
from api.generation.timing import Timing
from api.output_parsers.events import TextSpans
from shared.choice_deltas import ChoiceDelta, choice_deltas
from shared.messages import Delta, Finished, FinishReason, Usage
from shared.text.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """What every chunk of an answer repeats, and what the caller asked to see."""

    id: str  # public id
    model: str
    created_s: int
    num_choices: int = 1
    include_usage: bool = False
    num_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # given: show token ids
    service_tier: str | None = None  # given: say it
    timing: Timing | None = None  # given: show metrics


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How a choice ended, in the API's words."""

    finish_reason: str
    stop_reason: str | int | None = None


class ChoiceAnswer(Generic[EntryT]):
    """One choice in the making: what is known of it and not shown yet."""

    def __init__(
        self, index: int, facts: ResponseContext, tokenizer: Tokenizer, form: EntryForm[EntryT]
    ) -> None:
        self.index = index
        self.ending: ChoiceEnd | None = None
        self.spans: TextSpans | None = None  # where its text is the answer's; None: everywhere
        self._num_bytes = 0  # of its text so far
        self._shows_token_ids = facts.prompt_token_ids is not None
        self._token_ids: list[int] = []
        has_logprobs = facts.num_logprobs is not None
        self._aligner = LogprobAligner(tokenizer, form) if has_logprobs else None
        self._placed: list[PlacedLogprob[EntryT]] = []
        self._shows_stop_entries = False

    @property
    def held_bytes(self) -> int:
        """UTF-8 bytes at the end of its text of which is not known whose they are."""
        return 0 if self.spans is None else self._num_bytes - self.spans.num_bytes

    def follow_prompt(self, num_chars: int) -> None:
        """Its log probabilities stand behind those of a prompt of so many characters.

        To be called before `take`. They have an entry for every token, the one that ends it too:
        readers of such lists count from both ends.
        """
        self._shows_stop_entries = True
        if self._aligner is not None:
            self._aligner.begin_at(num_chars)

    def take(self, delta: ChoiceDelta) -> None:
        """New tokens of this choice; perhaps its last."""
        self._num_bytes += len(delta.text.encode())
        if self._shows_token_ids:
            self._token_ids.extend(delta.token_ids)
        if self._aligner is not None:
            self._placed.extend(self._aligner.push(delta.logprobs or (), self._num_bytes))
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, delta.stop_reason)

    def end(self, reason: FinishReason, stop_reason: str | int | None) -> ChoiceEnd:
        """Its text is over."""
        if self._aligner is not None:
            stopped = reason is FinishReason.STOP and not self._shows_stop_entries
            self._placed.extend(self._aligner.rest(self._num_bytes, stopped=stopped))
        self.ending = ChoiceEnd(reason.value, stop_reason)
        return self.ending

    def take_token_ids(self) -> list[int] | None:
        """Those not shown yet; None when none are to be shown."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids if self._shows_token_ids else None

    def take_placed(self) -> list[PlacedLogprob[EntryT]]:
        """Those not shown yet whose text is known to be the answer's."""
        placed, spans = self._placed, self.spans
        if spans is None:
            self._placed = []
            return placed
        decided = bisect_right(placed, spans.num_bytes, key=lambda entry: entry.end_bytes)
        if self.ending is not None:
            decided = len(placed)
        self._placed = placed[decided:]
        return [
            entry for entry in placed[:decided] if spans.holds(entry.start_bytes, entry.end_bytes)
        ]


class OpenAIAnswer(Formatter, Generic[EntryT]):
    """Base of the two dialects. A subclass says what a choice's text looks like."""

    chunk_object: str
    whole_object: str

    def __init__(
        self, facts: ResponseContext, tokenizer: Tokenizer, form: EntryForm[EntryT]
    ) -> None:
        """`form`: how the entries of log probabilities are kept."""
        self._facts = facts
        self._tokenizer = tokenizer
        self._choices = [
            ChoiceAnswer(index, facts, tokenizer, form) for index in range(facts.num_choices)
        ]

    def delta(self, delta: Delta) -> Sequence[Any]:
        members: list[dict[str, Any]] = []
        for part in choice_deltas(delta):
            choice = self._choices[part.choice]
            choice.take(part)
            if part.text:
                members += self._said(choice, part.text)
            if part.finish_reason is not None and choice.ending is not None:
                members += self._ended(choice, choice.ending)
        return [self._chunk([member]) for member in members]

    def held_bytes(self, choice: int) -> int:
        return self._choices[choice].held_bytes

    def finished(self, end: Finished) -> Sequence[Any]:
        members: list[dict[str, Any]] = []
        for choice in self._choices:
            if choice.ending is None:  # the only one: its end is the job's
                members += self._ended(choice, choice.end(end.reason, end.stop_reason))
        chunks = [self._chunk([member]) for member in members]
        if self._facts.include_usage:
            chunks.append({**self._chunk([]), "usage": self._usage(end.usage)})
        if chunks:
            chunks[-1].update(self._metrics(end.usage))
        return chunks

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return error.body()

    def collect(self, delta: Delta) -> None:
        for part in choice_deltas(delta):
            choice = self._choices[part.choice]
            choice.take(part)
            self._collect(choice, part.text)

    def whole(self, end: Finished) -> Any:
        for choice in self._choices:
            if choice.ending is None:
                choice.end(end.reason, end.stop_reason)
        choices = [
            self._whole(choice, choice.ending)
            for choice in self._shown()
            if choice.ending is not None
        ]
        answer = {
            "id": self._facts.id,
            "object": self.whole_object,
            "created": self._facts.created_s,
            "model": self._facts.model,
            "choices": choices,
            "usage": self._usage(end.usage),
            **self._service_tier(),
            **self._metrics(end.usage),
            **self._about_prompt(),
        }
        return answer

    def _shown(self) -> Sequence[ChoiceAnswer[EntryT]]:
        """The choices of a whole answer, in its order."""
        return self._choices

    def _about_prompt(self) -> dict[str, Any]:
        """Members of a whole answer, and of the first chunk of a stream."""
        token_ids = self._facts.prompt_token_ids
        return {} if token_ids is None else {"prompt_token_ids": token_ids}

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {
            "id": self._facts.id,
            "object": self.chunk_object,
            "created": self._facts.created_s,
            "model": self._facts.model,
            "choices": choices,
            **self._service_tier(),
        }
        if self._facts.include_usage:
            chunk["usage"] = None
        return chunk

    def _service_tier(self) -> dict[str, Any]:
        tier = self._facts.service_tier
        return {} if tier is None else {"service_tier": tier}

    def _metrics(self, usage: Usage) -> dict[str, Any]:
        """Times are those of one sequence of tokens: there are none for several choices."""
        timing = self._facts.timing
        if timing is None:
            return {}
        several = self._facts.num_choices > 1
        return {"metrics": None if several else timing.metrics(usage.completion_tokens)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_payload(usage)

    def _choice(
        self,
        choice: ChoiceAnswer[EntryT],
        member: dict[str, Any],
        end: ChoiceEnd | None = None,
        *,
        is_text: bool = True,
    ) -> dict[str, Any]:
        """A member of `choices`, with everything of it that can be shown by now.

        `is_text`: log probabilities of the answer's text may go with it.
        """
        said = {
            "index": choice.index,
            **member,
            "logprobs": self._logprobs(choice.take_placed()) if is_text else None,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None and end.stop_reason is not None:
            said["stop_reason"] = end.stop_reason
        token_ids = choice.take_token_ids()
        if token_ids is not None:
            said["token_ids"] = token_ids
        return said

    def _logprobs(self, placed: Sequence[PlacedLogprob[EntryT]]) -> Mapping[str, Any] | None:
        raise NotImplementedError

    def _collect(self, choice: ChoiceAnswer[EntryT], text: str) -> None:
        """Keeps new text for `_whole`."""
        raise NotImplementedError

    def _said(self, choice: ChoiceAnswer[EntryT], text: str) -> Iterable[dict[str, Any]]:
        """Members of `choices` for new text, one per chunk."""
        raise NotImplementedError

    def _ended(self, choice: ChoiceAnswer[EntryT], end: ChoiceEnd) -> Iterable[dict[str, Any]]:
        """The last members of `choices`, one per chunk."""
        raise NotImplementedError

    def _whole(self, choice: ChoiceAnswer[EntryT], end: ChoiceEnd) -> dict[str, Any]:
        """The one member of `choices` of an answer that was not streamed."""
        raise NotImplementedError


# ReasoningTokens: how many of a choice's tokens are reasoning.


class ReasoningTokens:
    """Counts exactly, by where in the text each token begins; nothing is encoded again.

    A marker's tokens count, and a token without text of its own counts where it stands.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._starts = array("q")  # in bytes
        self._num_bytes = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """All of the choice's tokens, in order: where the reasoning ends is known only later."""
        for token_id in token_ids:
            self._starts.append(self._num_bytes)
            self._num_bytes += len(self._detokenizer.push((token_id,)).encode())

    def count(self, reasoning_bytes: int) -> int:
        """Tokens that begin in the first `reasoning_bytes` of the text (a TurnParser's)."""
        return bisect_left(self._starts, reasoning_bytes)
