"""Formatter: formats a job's events as stream payloads or as one response body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from api.errors import ApiError, job_failed
from api.sse import PLAIN, Framing
from shared.messages import Delta, Failed, Finished, Usage


class Formatter(ABC):
    """One response of a dialect. Payloads are what JSON can carry; framing is not its concern.

    Streamed: `opening` once, `delta` for each, then `finished` or `job_failed`. Whole: `collect`
    for each, then `whole`. `failed` ends a stream whose job has not ended.
    """

    kind: str  # a Job's kind
    framing: Framing = PLAIN

    @abstractmethod
    def opening(self) -> Sequence[Any]:
        """Returns the payloads that are sent at admission, before any token."""

    def before_choice(self, choice: int) -> Iterable[Any]:
        """Yields the payloads that precede a choice's first tokens and have none of them. Once they
        were taken there are none."""
        return ()

    @abstractmethod
    def delta(self, delta: Delta) -> Sequence[Any]:
        """Returns the payloads for new tokens; none while their text is held back."""

    def held_bytes(self, choice: int) -> int:
        """Returns how many UTF-8 bytes of a choice's text no payload has yet: they may become a
        marker."""
        return 0

    @abstractmethod
    def finished(self, end: Finished) -> Sequence[Any]:
        """Returns the last payloads of a stream whose job finished."""

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

    @abstractmethod
    def collect(self, delta: Delta) -> None:
        """Keeps new tokens for `whole`."""

    @abstractmethod
    def whole(self, end: Finished) -> Any:
        """Returns the one payload of a response that is not streamed. Long lists may be
        iterators."""


def usage_payload(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Returns OpenAI's usage object. `reasoning_tokens` are among the completion's."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
