"""TurnEvent: what a piece of an assistant's turn is, told apart from the raw text of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins. `index` counts the turn's calls from 0; `call_id` is ours and unique."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


TurnEvent = Text | Reasoning | ToolCall | ToolArguments
