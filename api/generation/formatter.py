"""Formatter: formats a job's events as stream payloads or as one response body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from api.errors import ApiError, job_failed
from api.generation.choices import ChoiceEvent, ChoiceReader
from api.generation.logprobs import EntryT
from api.http.sse import PLAIN, Framing
from shared.messages import Delta, Failed, Finished, Usage


class Formatter(ABC, Generic[EntryT]):
    """One response of a dialect. Payloads are what JSON can carry; framing is not its concern.

    Streamed: `opening` once, `delta` for each, then `finished` or `job_failed`. Whole: `collect`
    for each, then `whole`. `failed` ends a stream whose job has not ended.

    A dialect shapes the events of its reader: `event` and `closing` in a stream; `keep` and `body`
    of a whole response, which is the same events, collected.
    """

    kind: str  # a Job's kind
    framing: Framing = PLAIN

    def __init__(self, reader: ChoiceReader[EntryT]) -> None:
        self.reader = reader

    @abstractmethod
    def opening(self) -> Sequence[Any]:
        """Returns the payloads that are sent at admission, before any token."""

    def before_choice(self, choice: int) -> Iterable[Any]:
        """Yields the payloads that precede a choice's first tokens and have none of them. Once they
        were taken there are none."""
        return ()

    def delta(self, delta: Delta) -> Sequence[Any]:
        """Returns the payloads for new tokens; none while their text is held back."""
        events = self.reader.read(delta)
        if len(events) == 1:
            return self.event(events[0])
        return [payload for event in events for payload in self.event(event)]

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
        """Returns a sentence that names where a client resumes behind `last_sent`; None: at the
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
        """Returns the payloads behind those of all events."""
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
