"""ToldEvents: a stream's events, and where its reader goes on.

A stream may be cut while a write waits for a slow client, who never gets it then. So a reader goes
on behind what was written, not behind what was made or read from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from api.generation.dialect import Dialect
from api.jobs.delta_parts import told
from api.jobs.gathered import GatheredDeltas, delta_of
from api.jobs.resume_point import ResumePoint
from api.jobs.sent_choices import ToldChoices, extent_of
from api.sse import whole_events
from shared.messages import Delta, Failed, Finished, choice_deltas


class ToldEvents:
    """The events of one answer in its dialect. Every item is whole events, or empty where the
    next one is not complete: between any two of them the stream may be cut. All events of what a
    choice is given at once are one item, so that none of its tokens is told in part."""

    def __init__(self, dialect: Dialect, stream_interval: int | None) -> None:
        """`stream_interval`: as GenerationResponse's."""
        self._dialect = dialect
        self._gathered = None if stream_interval is None else GatheredDeltas(stream_interval)
        self._choices = ToldChoices()
        self._counts_by_cursor = False  # choice 0 has begun, and nothing is gathered
        self._last_made: Any = None
        self.last_payload: Any = None  # that was written

    @property
    def resume_point(self) -> ResumePoint:
        """Where a reader goes on who has what was written: nothing is missing or comes twice."""
        return self._choices.resume_point

    def opening(self) -> Iterator[bytes]:
        """Yields the events before any token."""
        return self._events(self._dialect.opening())

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        """Yields the events that a delta completes."""
        for piece in told(delta, num_waiting):
            if self._counts_by_cursor and piece.segments is None and self._choices.in_order:
                if payloads := self._payloads_of(piece):
                    yield self._event_of(payloads)
                continue
            self._choices.log(piece)
            for part in self._parts(piece):
                yield from self._events_of_part(part)

    def wrote(self) -> None:
        """Everything that was made has been written."""
        self._choices.wrote()
        self.last_payload = self._last_made

    def ending(
        self,
        end: Finished | Failed,
        last_payloads: Callable[[Finished | Failed], Sequence[Any]],
    ) -> Iterator[bytes]:
        """Yields the events of what is held, then those of the end, which may be as long as the
        answer: a response's repeat it."""
        if self._gathered is not None:
            for part in self._gathered.rest():
                yield from self._events_of_part(part)
        is_finished = isinstance(end, Finished)
        if is_finished:
            yield from self._events(self._dialect.before_choice(0))
        # What the dialect holds is in one of the last events: a cut must not fall between them.
        is_one, events = is_finished and self._choices.has_untold, []
        for payload in last_payloads(end):
            for event in whole_events(self._dialect.framing, payload):
                if event:
                    self._last_made = payload
                if event and is_one:
                    events.append(event)
                yield b"" if is_one else event
        if is_one:
            self._choices.tell_all()
            yield b"".join(events)

    def _parts(self, piece: Delta) -> Iterator[Delta]:
        """Yields deltas of one choice each."""
        if self._gathered is not None:
            yield from self._gathered.push((piece,))
        elif len({segment.choice for segment in piece.segments or ()}) <= 1:
            yield piece
        else:
            yield from map(delta_of, choice_deltas(piece))

    def _payloads_of(self, piece: Delta) -> Sequence[Any]:
        """Returns the payloads of a piece of choice 0, before which all has been told."""
        payloads = self._dialect.delta(piece)
        held_bytes = self._dialect.held_bytes(0)
        if payloads and not held_bytes:
            self._choices.tell_in_order(piece.end)
            return payloads
        self._choices.log(piece)
        self._choices.take(0, extent_of(piece))
        if payloads:
            self._choices.tell(0, held_bytes)
        return payloads

    def _events_of_part(self, part: Delta) -> Iterator[bytes]:
        """Yields the events of a delta of one choice."""
        choice = part.segments[0].choice if part.segments else 0
        yield from self._events(self._dialect.before_choice(choice))
        extent = extent_of(part)
        self._choices.take(choice, extent)
        payloads = self._dialect.delta(part)
        if choice == 0:
            self._counts_by_cursor = self._gathered is None
        if payloads:
            self._choices.tell(choice, 0 if extent.has_end else self._dialect.held_bytes(choice))
            yield self._event_of(payloads)

    def _event_of(self, payloads: Sequence[Any]) -> bytes:
        self._last_made = payloads[-1]
        event = self._dialect.framing.event
        return event(payloads[0]) if len(payloads) == 1 else b"".join(map(event, payloads))

    def _events(self, payloads: Iterable[Any]) -> Iterator[bytes]:
        """Yields an event for each payload, which have no tokens."""
        for payload in payloads:
            event = self._dialect.framing.event(payload)
            self._last_made = payload
            yield event
