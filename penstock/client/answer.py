"""Deltas of a stream, and the answer at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a choice in one event: each token, each character is in one delta.

    `event` is the service's JSON as it came. After a connection was lost it may repeat what
    earlier deltas had; the other members never do.
    """

    text: str = ""
    index: int = 0  # of the choice
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # parts, as in OpenAI's chunks
    token_ids: tuple[int, ...] = ()
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None  # with the last delta of a choice
    event: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a prompt, as far as it was read."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices. `usage` is the service's, empty until the end; `metrics` where requested."""

    job_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any]
    metrics: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text if self.choices else ""

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """The first choice's."""
        return self.choices[0].tool_calls if self.choices else ()
