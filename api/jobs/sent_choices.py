"""ToldChoices: how much of each choice a stream has sent, and where its reader resumes.

Tokens of a choice are taken from the log, become part of an event, and are written. The stream may
be cut between any two of these steps.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from api.jobs.resume_point import NOTHING, Extent, ResumePoint
from shared.messages import START, Cursor, Delta


class _Part(NamedTuple):
    """A segment of the log."""

    choice: int
    upto: Extent  # of its choice, from the start of the log
    end: Cursor


class ToldChoices:
    """Counts, for each choice, the tokens and bytes that were logged, taken, put into events
    (`told`) and written.

    Most streams have one choice, and hold nothing back. While events have everything that was
    taken, in the log's order (`in_order`), one cursor replaces these counts: cheaper per token.
    """

    def __init__(self) -> None:
        self._cursor = START  # everything before it was written
        self._ordered_end: Cursor | None = START  # of what events have; None: counted by choice
        self._passed: dict[int, Extent] = {}  # of each choice, before the cursor
        self._log: deque[_Part] = deque()  # from the cursor on
        self._logged: dict[int, Extent] = {}  # to the end of `_log`
        self._taken: dict[int, Extent] = {}
        self._told: dict[int, Extent] = {}  # in events that were made
        self._written: dict[int, Extent] = {}

    @property
    def in_order(self) -> bool:
        """True while events have everything that was taken, in the log's order."""
        return self._ordered_end is not None

    @property
    def has_untold(self) -> bool:
        """True when tokens or text were taken that no event has."""
        return self._taken != self._told

    @property
    def resume_point(self) -> ResumePoint:
        """Where a reader goes on who has what was written."""
        ahead = {
            choice: Extent(
                written.num_tokens - passed.num_tokens,
                written.num_bytes - passed.num_bytes,
                written.has_end and not passed.has_end,
            )
            for choice, written in self._written.items()
            if (passed := self._passed.get(choice, NOTHING)) != written
        }
        return ResumePoint(self._cursor, ahead)

    def tell_in_order(self, end: Cursor) -> None:
        """An event has everything up to `end`, all of it choice 0's. Only while `in_order`."""
        self._ordered_end = end

    def log(self, delta: Delta) -> None:
        """Adds the next part of the log."""
        self._count_choices()
        if delta.segments is None:
            self._log.append(_Part(0, self._add(self._logged, 0, extent_of(delta)), delta.end))
            return
        num_tokens, num_bytes = delta.start
        for segment in delta.segments:
            num_tokens += segment.num_tokens
            num_bytes += segment.num_bytes
            has_end = segment.finish_reason is not None
            extent = Extent(segment.num_tokens, segment.num_bytes, has_end)
            upto = self._add(self._logged, segment.choice, extent)
            self._log.append(_Part(segment.choice, upto, Cursor(num_tokens, num_bytes)))

    def take(self, choice: int, extent: Extent) -> None:
        """So much more of a choice is known to who makes the events."""
        self._add(self._taken, choice, extent)

    def tell(self, choice: int, held_bytes: int = 0) -> None:
        """An event has what was taken of `choice`, but for the last bytes of its text."""
        taken = self._taken[choice]
        self._told[choice] = taken._replace(num_bytes=taken.num_bytes - held_bytes)

    def tell_all(self) -> None:
        """An event has all that was taken."""
        self._told = dict(self._taken)

    def wrote(self) -> None:
        """Every event that was made has been written."""
        if self._ordered_end is not None:
            self._cursor = self._ordered_end
            return
        self._written.update(self._told)
        while self._log and self._has(self._log[0]):
            part = self._log.popleft()
            self._passed[part.choice] = part.upto
            self._cursor = part.end
        if not self._log and self._taken == self._told:
            for sums in (self._passed, self._logged, self._taken, self._told, self._written):
                sums.clear()
            self._ordered_end = self._cursor

    def _count_choices(self) -> None:
        """Begins to count by choice: what events have and was not written is choice 0's."""
        if self._ordered_end is None:
            return
        begin, end = self._cursor, self._ordered_end
        self._ordered_end = None
        if begin != end:
            extent = Extent(end.num_tokens - begin.num_tokens, end.num_bytes - begin.num_bytes)
            self._log.append(_Part(0, extent, end))
            self._logged[0] = self._taken[0] = self._told[0] = extent

    def _has(self, part: _Part) -> bool:
        written, upto = self._written.get(part.choice, NOTHING), part.upto
        return (
            written.num_tokens >= upto.num_tokens
            and written.num_bytes >= upto.num_bytes
            and written.has_end >= upto.has_end
        )

    @staticmethod
    def _add(sums: dict[int, Extent], choice: int, extent: Extent) -> Extent:
        before = sums.get(choice, NOTHING)
        total = sums[choice] = Extent(
            before.num_tokens + extent.num_tokens,
            before.num_bytes + extent.num_bytes,
            before.has_end or extent.has_end,
        )
        return total


def extent_of(delta: Delta) -> Extent:
    """Returns how much of its choice a delta of one choice is."""
    segments, start, end = delta.segments, delta.start, delta.end
    has_end = segments is not None and segments[-1].finish_reason is not None
    return Extent(len(delta.token_ids), end.num_bytes - start.num_bytes, has_end)
