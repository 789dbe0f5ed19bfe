"""TurnParser: the port of whoever tells a model's text apart, and the one that has nothing to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from api.turn.events import Text, TurnEvent


class TurnParser(Protocol):
    """One choice's text in, its events out. Splitting the text differently changes no content."""

    has_calls: bool  # a tool call has begun

    def push(self, text: str) -> Sequence[TurnEvent]:
        """What this text completes; what may still become something else is held back."""
        ...

    def finish(self) -> Sequence[TurnEvent]:
        """The rest, when the text has ended. Nothing is pushed afterwards."""
        ...


class PlainParser:
    """All of it is the answer."""

    has_calls = False

    def push(self, text: str) -> Sequence[TurnEvent]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[TurnEvent]:
        return ()


NewParser = Callable[[], TurnParser]
