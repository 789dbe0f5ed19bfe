"""Dialect: how one answer is said, in chunks or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from api.errors import ApiError
from api.sse import Framing
from shared.messages import Delta, Finished, Usage


class Dialect(Protocol):
    """One answer in the making. Payloads are what JSON can carry; framing is not its concern.

    Streamed: `opening` once, `delta` for each, then `finished`. Whole: `collect` for each, then
    `whole`. `failed` takes the place of the end in a stream.
    """

    kind: str  # a Job's kind
    framing: Framing

    def opening(self) -> Sequence[Any]:
        """Payloads that are sent at admission, before any token."""
        ...

    def before_choice(self, choice: int) -> Iterable[Any]:
        """Payloads that precede a choice's first tokens and have none of them. Once they were
        taken there are none."""
        ...

    def delta(self, delta: Delta) -> Sequence[Any]:
        """Payloads for new tokens; none while their text is held back."""
        ...

    def held_bytes(self, choice: int) -> int:
        """How much of a choice's text no payload has yet: it may become a marker. UTF-8 bytes."""
        ...

    def finished(self, end: Finished) -> Sequence[Any]:
        """The last payloads of a stream that ended by itself."""
        ...

    def failed(self, error: ApiError) -> Any:
        """The last payload of every other stream."""
        ...

    def collect(self, delta: Delta) -> None: ...
    def whole(self, end: Finished) -> Any:
        """The one payload of an answer that was not streamed. Long lists may be iterators."""
        ...


def usage_payload(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object. `reasoning_tokens` are among the completion's."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
