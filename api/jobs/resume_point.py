"""ResumePoint: where a reader of a job goes on, choice by choice.

With several choices, events are not sent in the order of the log: tokens of one choice may be held
back while those of another are sent. A cursor alone would repeat some of them, or lose some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from api.jobs.reader_position import Diverged
from shared.choice_deltas import ChoiceDelta
from shared.messages import MAX_CHOICES, START, Cursor

_AHEAD = re.compile(r"([0-9]{1,3})-([0-9]{1,12})-([0-9]{1,12})(e?)")
_AHEAD_CHARS = 31  # of one choice in the text form, at most


class Extent(NamedTuple):
    """So much of a choice: tokens, UTF-8 bytes of text, and whether its end is among it."""

    num_tokens: int = 0
    num_bytes: int = 0
    has_end: bool = False


NOTHING = Extent()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A reader has everything before `cursor`, and of each choice in `ahead` so much behind it.

    Its text form is the SSE event id: the cursor's, then `.<choice>-<tokens>-<bytes>` for each
    choice in `ahead`, with an `e` at the end where the choice's end is among it.
    """

    cursor: Cursor = START
    ahead: Mapping[int, Extent] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.cursor) + "".join(
            f".{choice}-{had.num_tokens}-{had.num_bytes}{'e' if had.has_end else ''}"
            for choice, had in sorted(self.ahead.items())
        )

    @classmethod
    def parse(cls, text: str) -> ResumePoint:
        """Raises ValueError for anything but the text form of a ResumePoint."""
        cursor, *parts = text[: 41 + MAX_CHOICES * _AHEAD_CHARS].split(".")
        ahead: dict[int, Extent] = {}
        for part in parts:
            found = _AHEAD.fullmatch(part)
            choice = MAX_CHOICES if found is None else int(found[1])
            if found is None or choice >= MAX_CHOICES or choice in ahead:
                raise ValueError(f"not a resume point: {text[:40]!r}")
            ahead[choice] = Extent(int(found[2]), int(found[3]), bool(found[4]))
        return cls(Cursor.parse(cursor), ahead)


class AheadTrimmer:
    """Leaves out of a log what its reader has of it ahead of its cursor."""

    def __init__(self, ahead: Mapping[int, Extent]) -> None:
        self._left = dict(ahead)

    @property
    def left(self) -> Mapping[int, Extent]:
        """What has not been left out yet, of each choice that has any. A copy."""
        return dict(self._left)

    def rest_of(self, part: ChoiceDelta) -> ChoiceDelta | None:
        """Returns what of `part` the reader lacks; None: nothing. The parts are those behind the
        cursor, in the log's order.

        Raises Diverged when what the reader has ends within a character.
        """
        had = self._left.get(part.choice)
        if had is None:
            return part
        text = part.text.encode()
        num_tokens = min(had.num_tokens, len(part.token_ids))
        num_bytes = min(had.num_bytes, len(text))
        is_end = part.finish_reason is not None
        left = Extent(
            had.num_tokens - num_tokens, had.num_bytes - num_bytes, had.has_end and not is_end
        )
        self._left[part.choice] = left
        if left == NOTHING:
            del self._left[part.choice]
        rest = part._replace(
            token_ids=part.token_ids[num_tokens:],
            text=_rest_of_text(text, num_bytes),
            logprobs=None if part.logprobs is None else part.logprobs[num_tokens:],
        )
        if had.has_end and is_end:
            rest = rest._replace(finish_reason=None, stop_reason=None)
        return rest if rest.token_ids or rest.text or rest.finish_reason is not None else None


def resume_hint(job_id: str, resume_point: ResumePoint) -> str:
    """A sentence for a reader whose stream ends before its job does."""
    return (
        f"GET /v1/jobs/{job_id}/stream with the header 'Last-Event-ID: {resume_point}' goes on "
        "from here."
    )


def _rest_of_text(text: bytes, num_bytes: int) -> str:
    try:
        return text[num_bytes:].decode()
    except UnicodeDecodeError as error:
        raise Diverged(f"{num_bytes} bytes cut a character of the log in two") from error
