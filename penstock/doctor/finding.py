"""Finding: what one check saw, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """OK; WARNING: it serves, but something is lost, slow or about to fail; ERROR: it does not."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names the checked part; `sentence` has the finding, with a remedy."""

    check: str
    level: Level
    sentence: str


def fine(check: str, sentence: str) -> Finding:
    """Returns a finding that needs nothing."""
    return Finding(check, Level.OK, sentence)


def warning(check: str, sentence: str) -> Finding:
    """Returns a finding with which it serves."""
    return Finding(check, Level.WARNING, sentence)


def wrong(check: str, sentence: str) -> Finding:
    """Returns a finding with which it does not serve."""
    return Finding(check, Level.ERROR, sentence)
