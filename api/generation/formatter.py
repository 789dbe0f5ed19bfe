"""Formats a job's events as stream payloads or as one response body.

Formatter is the interface of all dialects; ChunkFormatter is the base of chat and completions.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from api.errors import ApiError, job_failed
from api.generation.choices import ChoiceEnd, ChoiceEvent, ChoiceReader, EntryT, PlacedLogprob
from api.http.sse import PLAIN, Framing, json_bytes
from api.on_demand import load_part
from api.output_parsers.events import OutputEvent, Text
from shared.messages import Delta, Failed, Finished, Job, PromptSlice, Usage

PlainEvent = Callable[[Sequence[int], str], bytes]  # of token ids and their text


class PromptScores(Protocol):
    """Collects the log probabilities of a job's prompt from its log, before the first delta.

    See `api.generation.logprobs.ScoredPrompt`.
    """

    @property
    def is_complete(self) -> bool: ...

    def take(self, part: PromptSlice) -> None: ...


_MARK = "\u241e"  # where a template has the text


class Formatter(ABC, Generic[EntryT]):
    """One response of a dialect. Payloads are JSON values; framing is left to the stream.

    Streamed: `opening` once, `beginning` once where `has_beginning`, `delta` for each, then
    `finished` or `job_failed`. Whole: `collect` for each, then `whole`. `failed` ends a stream
    whose job has not ended.

    A dialect shapes the events of its reader: `event` and `closing` in a stream; `keep` and `body`
    of a whole response, which is the same events, collected.
    """

    kind: str  # a Job's kind
    framing: Framing = PLAIN
    has_beginning = False

    def __init__(self, reader: ChoiceReader[EntryT]) -> None:
        self.reader = reader

    @abstractmethod
    def opening(self) -> Sequence[Any]:
        """Returns the payloads that are sent at admission, before any token."""

    def beginning(self, cached_tokens: int) -> Sequence[Any]:
        """Returns the payloads that are sent when the first tokens come: from then on it is known
        how many tokens of the prompt the cache had."""
        return ()

    def before_choice(self, choice: int) -> Iterable[Any]:
        """Yields the payloads that precede a choice's first tokens and have none of them. Once they
        were taken the list is empty."""
        return ()

    def delta(self, delta: Delta) -> Sequence[Any]:
        """Returns the payloads for new tokens; none while their text is held back."""
        events = self.reader.read(delta)
        if len(events) == 1:
            return self.event(events[0])
        return [payload for event in events for payload in self.event(event)]

    def plain_event(self) -> PlainEvent | None:
        """Returns an encoder for pieces of choice 0's text, for a stream that has started and holds
        nothing back; None where only `delta` makes such events."""
        return None

    def held_bytes(self, choice: int) -> int:
        """Returns how many UTF-8 bytes of a choice's text no payload has yet: they may become a
        marker."""
        return self.reader.held_bytes(choice)

    def finished(self, end: Finished) -> Sequence[Any]:
        """Returns the last payloads of a stream whose job finished."""
        payloads = [payload for event in self.reader.finish(end) for payload in self.event(event)]
        return [*payloads, *self.closing(end)]

    def job_failed(self, end: Failed, *, delivered: bool) -> Sequence[Any]:
        """Returns the last payloads of a stream whose job ended otherwise. `delivered`: the reader
        has some of its tokens."""
        return (self.failed(job_failed(end, delivered=delivered)),)

    @abstractmethod
    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        """Returns the last payload of a stream that ends before its job does. `last_sent`: the
        payload that was sent before; None: none."""

    def resume_hint(self, last_sent: Any) -> str | None:
        """Returns a sentence on how a client resumes after `last_sent`; None: from the
        job's own stream."""
        return None

    def collect(self, delta: Delta) -> None:
        """Keeps new tokens for `whole`."""
        for event in self.reader.read(delta):
            self.keep(event)

    def whole(self, end: Finished) -> Any:
        """Returns the one payload of a response that is not streamed. Long lists may be
        iterators."""
        for event in self.reader.finish(end):
            self.keep(event)
        return self.body(end)

    @abstractmethod
    def event(self, event: ChoiceEvent[EntryT]) -> Sequence[Any]:
        """Returns the payloads of an event in a stream."""

    def closing(self, end: Finished) -> Sequence[Any]:
        """Returns the last payloads of a finished stream, after those of its events."""
        return ()

    @abstractmethod
    def keep(self, event: ChoiceEvent[EntryT]) -> None:
        """Keeps an event for `body`."""

    @abstractmethod
    def body(self, end: Finished) -> Any:
        """Returns the payload of the events that were kept."""


def usage_payload(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Returns OpenAI's usage object. `reasoning_tokens` are among the completion's."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """The members of every chunk, and those of some that the request includes."""

    id: str  # public id
    model: str
    created_s: int
    num_choices: int = 1
    include_usage: bool = False
    counted_prompt_tokens: int | None = None  # given: show the usage so far in each chunk
    num_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # given: show token ids
    service_tier: str | None = None  # given: show it
    timing: Timing | None = None  # given: show metrics


@dataclass(slots=True)
class KeptChoice:
    """One choice of a whole response, so far."""

    token_ids: list[int] | None
    entries: list[Any] = field(default_factory=list)  # of log probabilities
    end: ChoiceEnd | None = None


class ChunkFormatter(Formatter[EntryT], Generic[EntryT]):
    """Formats OpenAI's chunks and `choices`. A dialect shapes the piece of a choice:
    `delta_member` and `whole_member`."""

    chunk_object: str
    whole_object: str

    def __init__(self, context: ResponseContext, reader: ChoiceReader[EntryT]) -> None:
        super().__init__(reader)
        self._context = context
        self._num_tokens = 0  # of a stream, so far
        has_ids = context.prompt_token_ids is not None
        self._kept = [KeptChoice([] if has_ids else None) for _ in range(context.num_choices)]

    @abstractmethod
    def delta_member(self, piece: OutputEvent | None) -> dict[str, Any]:
        """Returns the member of a chunk's choice that has a piece; None: the choice's end."""

    @abstractmethod
    def keep_piece(self, choice: int, piece: OutputEvent) -> None:
        """Keeps a piece for `whole_member`."""

    @abstractmethod
    def whole_member(self, choice: int) -> dict[str, Any]:
        """Returns the member of a whole response's choice that has its pieces."""

    @abstractmethod
    def entries(self, placed: Sequence[PlacedLogprob[EntryT]]) -> Sequence[Any]:
        """Returns the kept form of log probabilities."""

    @abstractmethod
    def logprobs(self, entries: Sequence[Any]) -> Mapping[str, Any] | None:
        """Returns the member `logprobs` of a choice."""

    def event(self, event: ChoiceEvent[EntryT]) -> Sequence[Any]:
        member = self._choice(
            event.choice,
            self.delta_member(event.piece),
            self.entries(event.logprobs) if event.logprobs else (),
            event.token_ids,
            event.end,
        )
        return (self._chunk([member]),)

    def delta(self, delta: Delta) -> Sequence[Any]:
        self._num_tokens += len(delta.token_ids)
        return super().delta(delta)

    def plain_event(self) -> PlainEvent | None:
        """Returns an encoder that inserts text into a chunk that was encoded once."""
        has_usage = self._context.counted_prompt_tokens is not None
        if not self.reader.is_plain or self.reader.has_token_ids or has_usage:
            return None
        (chunk,) = self.event(ChoiceEvent(0, Text(_MARK)))
        before, mark, after = self.framing.event(chunk).rpartition(json_bytes(_MARK))
        assert mark, "the chunk has the text"
        return lambda _, text: before + json_bytes(text) + after

    def finished(self, end: Finished) -> Sequence[Any]:
        self._num_tokens = end.usage.completion_tokens
        chunks = super().finished(end)
        if chunks:
            chunks[-1].update(self._metrics(end.usage))
        return chunks

    def closing(self, end: Finished) -> Sequence[Any]:
        if not self._context.include_usage:
            return ()
        return ({**self._chunk([]), "usage": self._usage(end.usage)},)

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return error.body()

    def keep(self, event: ChoiceEvent[EntryT]) -> None:
        kept = self._kept[event.choice]
        if event.logprobs:
            kept.entries += self.entries(event.logprobs)
        if event.token_ids and kept.token_ids is not None:
            kept.token_ids += event.token_ids
        if event.piece is None:
            kept.end = event.end
        else:
            self.keep_piece(event.choice, event.piece)

    def body(self, end: Finished) -> Any:
        return {
            "id": self._context.id,
            "object": self.whole_object,
            "created": self._context.created_s,
            "model": self._context.model,
            "choices": [self.whole_choice(choice) for choice in self.shown_choices()],
            "usage": self._usage(end.usage),
            **self._service_tier(),
            **self._metrics(end.usage),
            **self.prompt_members(),
        }

    def whole_choice(self, choice: int) -> dict[str, Any]:
        """Returns one of a whole response's `choices`."""
        kept = self._kept[choice]
        return self._choice(
            choice, self.whole_member(choice), kept.entries, kept.token_ids, kept.end
        )

    def shown_choices(self) -> Sequence[int]:
        """Returns the choices of a whole response, in its order."""
        return range(len(self._kept))

    def prompt_members(self) -> dict[str, Any]:
        """Returns members of a whole response, and of the first chunk of a stream."""
        token_ids = self._context.prompt_token_ids
        return {} if token_ids is None else {"prompt_token_ids": token_ids}

    def finish_reason(self, end: ChoiceEnd) -> str | None:
        return None if end.reason is None else end.reason.value

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        context = self._context
        chunk = {
            "id": context.id,
            "object": self.chunk_object,
            "created": context.created_s,
            "model": context.model,
            "choices": choices,
        }
        if context.service_tier is not None:
            chunk["service_tier"] = context.service_tier
        if choices and context.counted_prompt_tokens is not None:
            chunk["usage"] = {
                "prompt_tokens": context.counted_prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": context.counted_prompt_tokens + self._num_tokens,
            }
        elif context.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self,
        choice: int,
        member: dict[str, Any],
        entries: Sequence[Any] = (),
        token_ids: list[int] | None = None,
        end: ChoiceEnd | None = None,
    ) -> dict[str, Any]:
        """Returns an item of `choices`."""
        item = {
            "index": choice,
            **member,
            "logprobs": self.logprobs(entries) if entries else None,
            "finish_reason": None if end is None else self.finish_reason(end),
        }
        if end is not None and end.stop_reason is not None:
            item["stop_reason"] = end.stop_reason
        if token_ids is not None:
            item["token_ids"] = token_ids
        return item

    def _service_tier(self) -> dict[str, Any]:
        tier = self._context.service_tier
        return {} if tier is None else {"service_tier": tier}

    def _metrics(self, usage: Usage) -> dict[str, Any]:
        """Times are those of one sequence of tokens: several choices have no times."""
        timing = self._context.timing
        if timing is None:
            return {}
        several = self._context.num_choices > 1
        return {"metrics": None if several else timing.metrics(usage.completion_tokens)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_payload(usage, self.reader.reasoning_tokens or 0)


@dataclass(slots=True)
class Timing:
    """When a response reached its stages: seconds of the monotonic clock; None: not yet."""

    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None  # a worker reported that it took the job
    first_token_s: float | None = None
    last_token_s: float | None = None

    def token_came(self) -> float | None:
        """Marks new tokens; returns the seconds since the last ones, None for the first."""
        now_s = time.monotonic()
        gap_s = None if self.last_token_s is None else now_s - self.last_token_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        return gap_s

    @property
    def ttft_ms(self) -> float | None:
        """Returns the time from submit to the first token, in milliseconds with one decimal."""
        if self.first_token_s is None:
            return None
        return round((self.first_token_s - self.submitted_s) * 1000, 1)

    def metrics(self, num_tokens: int) -> dict[str, float | None]:
        """Returns the figures of a response of one choice with `num_tokens`, in milliseconds and
        tokens per second. None: not observed."""
        figures: dict[str, float | None] = load_part("timing_metrics").metrics(self, num_tokens)
        return figures


# Estimates how many bytes a response has, before and while it is made: its length is unknown before
# a worker has generated it. They are the bytes of JSON for a token of a common vocabulary, and for
# each of its alternatives.

TOKEN_BYTES = 8  # of text, escapes included
TOKEN_ID_BYTES = 8
CHAT_ENTRY_BYTES = 96  # {"token":" light","logprob":-1.34567832946777,"bytes":[32,108,105,103,104]}
COMPLETION_ENTRY_BYTES = 40  # " light":-11.34567832946777 in one of three lists
PROMPT_ENTRY_BYTES = 72  # "1234":{"logprob":-1.234567,"rank":1234,"decoded_token":" light"}
SHORT_BYTES = 65_536  # encoded in one go, in less than a millisecond


def prompt_logprobs_bytes(num_tokens: int, num_top: int | None) -> int:
    """Returns the bytes that `prompt_logprobs` of `num_tokens` tokens, with `num_top` alternatives
    each, take in an answer; 0 where the request has none (None)."""
    return 0 if num_top is None else num_tokens * (1 + num_top) * PROMPT_ENTRY_BYTES


def delta_bytes(delta: Delta) -> int:
    """Returns about how many bytes of an answer a delta is."""
    num_bytes = len(delta.text) + TOKEN_ID_BYTES * len(delta.token_ids)
    if delta.logprobs:
        num_bytes += len(delta.logprobs) * (1 + len(delta.logprobs[0].top)) * CHAT_ENTRY_BYTES
    return num_bytes


def is_small_response(job: Job, end: Finished | Failed) -> bool:
    """Returns whether the response of such a job, with its prompt in each choice, is small."""
    if job.pooling is not None:
        return False
    alternatives = job.sampling.logprobs
    token_bytes = TOKEN_BYTES + TOKEN_ID_BYTES
    entry_bytes = 0 if alternatives is None else (1 + alternatives) * CHAT_ENTRY_BYTES
    num_prompt_tokens = end.usage.prompt_tokens
    scores_bytes = prompt_logprobs_bytes(num_prompt_tokens, job.sampling.prompt_logprobs)
    prompt_bytes = job.num_choices * (num_prompt_tokens * token_bytes + scores_bytes)
    answer_bytes = end.usage.completion_tokens * (token_bytes + entry_bytes)
    return prompt_bytes + answer_bytes <= SHORT_BYTES
