"""ToldEvents: a stream's events, and how far its reader has been told.

A stream may be cut while a write waits for a slow client, who never gets it then. So the place to
go on from lies behind what was written, not behind what was made or read from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from api.dialect import Dialect
from api.gathered import GatheredDeltas
from api.pieces import told
from api.sse import whole_events
from shared.messages import START, Cursor, Delta


class ToldEvents:
    """The events of one answer in its dialect. Every item is a whole event, or empty where the
    next one is not complete: between any two of them the stream may be cut."""

    def __init__(self, dialect: Dialect, stream_interval: int | None) -> None:
        """`stream_interval`: as GenerationResponse's."""
        self._dialect = dialect
        self._gathered = None if stream_interval is None else GatheredDeltas(stream_interval)
        self._is_within = False  # a delta, or the end: a part of its events was not written
        self._taken = self._made = self._written = START
        self._last_made: Any = None
        self.last_payload: Any = None  # that was written

    @property
    def place(self) -> Cursor:
        """Where a reader goes on who has what was written, and `rest`.

        Nothing before it is missing. Where the tokens of several choices are gathered, some behind
        it may have been told.
        """
        is_told = self._gathered is not None and not self._is_within
        return self._taken if is_told else self._written

    def opening(self) -> Iterator[bytes]:
        """Yields the events before any token."""
        return self._said(self._dialect.opening())

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        """Yields the events that a delta completes; `end_delta` follows when they are written."""
        self._is_within = True
        for piece in told(delta, num_waiting):
            given = (piece,) if self._gathered is None else self._gathered.push((piece,))
            payloads = [payload for part in given for payload in self._dialect.delta(part)]
            is_place = self._gathered is None or self._gathered.is_empty
            yield from self._said(payloads, piece.end if is_place else None)

    def wrote(self) -> None:
        """Everything that was made has been written."""
        self._written, self.last_payload = self._made, self._last_made

    def end_delta(self, delta: Delta) -> None:
        """All events of `delta` have been written."""
        self._is_within, self._taken = False, delta.end

    def rest(self) -> Sequence[Any]:
        """Returns the payloads of what is held: nothing within a delta, as the place to go on from
        is before it. To be called once, when the stream ends."""
        if self._gathered is None or self._is_within:
            return ()
        self._is_within = True
        return [payload for part in self._gathered.rest() for payload in self._dialect.delta(part)]

    def ending(self, rest: Sequence[Any], last: Sequence[Any]) -> Iterator[bytes]:
        """Yields the events of `rest`, then those of the end, which may be as long as the answer:
        a response's repeat it."""
        self._is_within = True
        yield from self._said(rest, self._taken)
        for payload in last:
            for event in whole_events(self._dialect.framing, payload):
                self._last_made = payload if event else self._last_made
                yield event

    def farewell(self, last: Any) -> bytes:
        """Returns the event of `last`, behind what is held: for a stream that ends before its job
        does."""
        return b"".join(map(self._dialect.framing.event, (*self.rest(), last)))

    def _said(self, payloads: Sequence[Any], place: Cursor | None = None) -> Iterator[bytes]:
        """Yields an event for each payload. `place`: where one goes on who has them all."""
        for num_left, payload in zip(reversed(range(len(payloads))), payloads, strict=True):
            event = self._dialect.framing.event(payload)
            self._last_made = payload
            if place is not None and not num_left:
                self._made = place
            yield event
