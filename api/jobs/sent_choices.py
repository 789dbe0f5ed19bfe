"""SentChoices: the offset of a stream whose events are not in the log's order."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from api.jobs.reader_position import NOTHING, Extent, ResumePoint, extent_of
from shared.messages import Cursor, Delta


class _Part(NamedTuple):
    """A segment of the log."""

    choice: int
    upto: Extent  # of its choice, from the start of the log
    end: Cursor


class SentChoices:
    """Counts, for each choice, the tokens and bytes that were logged, taken from the log, included
    in events, and sent. The stream may be cut between any two of these steps.
    """

    def __init__(self, begin: Cursor, end: Cursor, taken: Cursor) -> None:
        """Everything before `begin` was sent; events include the rest up to `end`, and not yet what
        was taken up to `taken`. All of that is choice 0's."""
        self.cursor = begin  # everything before it was sent
        self._passed: dict[int, Extent] = {}  # of each choice, before the cursor
        self._log: deque[_Part] = deque()  # from the cursor on
        self._logged: dict[int, Extent] = {}  # to the end of `_log`
        self._taken: dict[int, Extent] = {}
        self._included: dict[int, Extent] = {}
        self._sent: dict[int, Extent] = {}
        if begin != end:
            self._log_taken(begin, end)
            self.include(0)
        if end != taken:
            self._log_taken(end, taken)

    @property
    def has_pending(self) -> bool:
        """Returns whether tokens or text were taken that no event includes."""
        return self._taken != self._included

    @property
    def resume_point(self) -> ResumePoint:
        """Returns the offset from which a reader of the sent events resumes."""
        ahead = {
            choice: Extent(
                sent.num_tokens - passed.num_tokens,
                sent.num_bytes - passed.num_bytes,
                sent.has_end and not passed.has_end,
            )
            for choice, sent in self._sent.items()
            if (passed := self._passed.get(choice, NOTHING)) != sent
        }
        return ResumePoint(self.cursor, ahead)

    def log(self, delta: Delta) -> None:
        """Adds the next part of the log."""
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
        """Counts the part of a choice that the formatter gets."""
        self._add(self._taken, choice, extent)

    def include(self, choice: int, held_bytes: int = 0) -> None:
        """Records that an event includes all taken text of `choice`, except the last bytes."""
        taken = self._taken[choice]
        self._included[choice] = taken._replace(num_bytes=taken.num_bytes - held_bytes)

    def include_all(self) -> None:
        """Records that an event includes everything that was taken."""
        self._included = dict(self._taken)

    def mark_sent(self) -> None:
        """Records that every event was sent."""
        self._sent.update(self._included)
        while self._log and self._has(self._log[0]):
            part = self._log.popleft()
            self._passed[part.choice] = part.upto
            self.cursor = part.end

    @property
    def is_sent(self) -> bool:
        """Returns whether all of the log was sent, so that the cursor alone is the offset."""
        return not self._log and self._taken == self._included

    def _has(self, part: _Part) -> bool:
        sent, upto = self._sent.get(part.choice, NOTHING), part.upto
        return (
            sent.num_tokens >= upto.num_tokens
            and sent.num_bytes >= upto.num_bytes
            and sent.has_end >= upto.has_end
        )

    def _log_taken(self, begin: Cursor, end: Cursor) -> None:
        """Adds a part of the log, choice 0's, that the formatter has."""
        extent = Extent(end.num_tokens - begin.num_tokens, end.num_bytes - begin.num_bytes)
        self._log.append(_Part(0, self._add(self._logged, 0, extent), end))
        self.take(0, extent)

    @staticmethod
    def _add(sums: dict[int, Extent], choice: int, extent: Extent) -> Extent:
        before = sums.get(choice, NOTHING)
        total = sums[choice] = Extent(
            before.num_tokens + extent.num_tokens,
            before.num_bytes + extent.num_bytes,
            before.has_end or extent.has_end,
        )
        return total
