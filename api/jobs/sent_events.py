"""SentEvents: encodes a stream's events in its dialect and tracks the offset that was sent.

A stream may be cut while a write waits for a slow client, which never gets it then. So a reader
resumes after the events that were sent, not after those that were encoded or read from the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import starmap
from typing import Any

from api.errors import ApiError
from api.generation.formatter import Formatter, PlainEvent
from api.http.sse import whole_events
from api.jobs.reader_position import ResumePoint, extent_of, resume_hint
from api.on_demand import load_part
from shared.choice_deltas import ChoiceDelta, choice_deltas, sums_of
from shared.messages import START, Cursor, Delta, Failed, Finished, Segment


class SentEvents:
    """An EventEncoder over a dialect's formatter.

    All events of one part of a choice are one item, so that none of its tokens is sent in part.
    """

    has_ids = False

    def __init__(
        self,
        formatter: Formatter[Any],
        stream_interval: int | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Takes the tokens of a choice per event; None: an event per step.

        Without `counts` there is no resume point: the formatter's own hint names the place.
        """
        self._counts = counts
        self.framing = formatter.framing
        self._formatter = formatter
        self._batched: Any = None
        if stream_interval is not None:
            self._batched = load_part("batched_deltas").BatchedDeltas(stream_interval)
        self._place = SentPlace()
        self._has_begun = False  # choice 0 has started, and nothing is batched
        self._plain_event: PlainEvent | None = None  # of such a stream
        self._has_delta = False
        self._last_encoded: Any = None
        self._last_sent: Any = None  # payload

    @property
    def resume_point(self) -> ResumePoint:
        """Returns the offset from which a reader of the sent events misses and repeats nothing."""
        return self._place.resume_point

    def resume_hint(self, job_id: str) -> str:
        hint = self._formatter.resume_hint(self._last_sent)
        return resume_hint(job_id, self.resume_point) if hint is None else hint

    def opening(self) -> Iterator[bytes]:
        return self._events(self._formatter.opening())

    def beginning(self, cached_tokens: int) -> Iterator[bytes]:
        """Yields the events that a dialect sends when the first tokens come."""
        return self._events(self._formatter.beginning(cached_tokens))

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        self._has_delta = True
        is_even = self._place.in_order and not self._place.has_pending
        plain_event = self._plain_event if is_even else None  # it knows of no earlier tokens
        if plain_event is not None and (pieces := plain_pieces(delta, num_waiting)):
            self._place.include_in_order(delta.end)
            yield b"".join(starmap(plain_event, pieces))
            return
        for piece in split_by_step(delta, num_waiting):
            if self._is_in_order(piece):
                if not self._has_begun:
                    yield from self._events(self._formatter.before_choice(0))
                payloads = self._payloads_of(piece)
                self._begin()
                if payloads:
                    yield self._event_of(payloads)
                continue
            if self._counts:
                self._place.by_choice.log(piece)
            for part in self._parts(piece):
                yield from self._events_of_part(part)

    def ending(self, end: Finished | Failed, *, is_small: bool) -> Iterator[bytes]:
        """Yields the events of held back text, then those of the end, which may be as long as
        the whole output: a response's repeat it."""
        if self._batched is not None:
            for part in self._batched.rest():
                yield from self._events_of_part(part)
        is_finished = isinstance(end, Finished)
        if is_finished:
            yield from self._events(self._formatter.before_choice(0))
        # What the formatter holds back is in one of the last events: no cut between them.
        is_one, events = is_finished and self._place.has_pending, []
        for payload in self._last_payloads(end):
            for event in self._encoded(payload, is_small=is_small):
                if event:
                    self._last_encoded = payload
                if event and is_one:
                    events.append(event)
                yield b"" if is_one else event
        if is_one:
            self._place.include_all()
            yield b"".join(events)

    def _encoded(self, payload: Any, *, is_small: bool) -> Iterable[bytes]:
        return (self.framing.event(payload),) if is_small else whole_events(self.framing, payload)

    def failed(self, error: ApiError) -> bytes:
        return self.framing.event(self._formatter.failed(error, self._last_sent))

    def mark_sent(self) -> None:
        self._place.mark_sent()
        self._last_sent = self._last_encoded

    def _last_payloads(self, end: Finished | Failed) -> Sequence[Any]:
        if isinstance(end, Finished):
            return self._formatter.finished(end)
        return self._formatter.job_failed(end, delivered=self._has_delta)

    def _is_in_order(self, piece: Delta) -> bool:
        """Returns whether a piece is choice 0's, and events include everything before it."""
        is_plain = self._counts and self._batched is None and piece.segments is None
        return is_plain and self._place.in_order

    def _begin(self) -> None:
        """Records that choice 0 has started."""
        if not self._has_begun and self._batched is None:
            self._has_begun = True
            self._plain_event = self._formatter.plain_event()

    def _parts(self, piece: Delta) -> Iterator[Delta]:
        """Yields deltas of one choice each."""
        if self._batched is not None:
            yield from self._batched.push((piece,))
        elif len({segment.choice for segment in piece.segments or ()}) <= 1:
            yield piece
        else:
            yield from map(delta_of, choice_deltas(piece))

    def _payloads_of(self, piece: Delta) -> Sequence[Any]:
        """Returns the payloads of a piece of choice 0, before which everything was encoded."""
        payloads = self._formatter.delta(piece)
        held_bytes = self._formatter.held_bytes(0)
        if not held_bytes:
            if payloads:
                self._place.include_in_order(piece.end)
            else:
                self._place.take_in_order(piece.end)
            return payloads
        self._place.by_choice.log(piece)
        self._place.by_choice.take(0, extent_of(piece))
        if payloads:
            self._place.by_choice.include(0, held_bytes)
        return payloads

    def _events_of_part(self, part: Delta) -> Iterator[bytes]:
        """Yields the events of a delta of one choice."""
        choice = part.segments[0].choice if part.segments else 0
        yield from self._events(self._formatter.before_choice(choice))
        if not self._counts:
            if payloads := self._formatter.delta(part):
                yield self._event_of(payloads)
            return
        extent = extent_of(part)
        self._place.by_choice.take(choice, extent)
        payloads = self._formatter.delta(part)
        if choice == 0:
            self._begin()
        if payloads:
            held_bytes = 0 if extent.has_end else self._formatter.held_bytes(choice)
            self._place.by_choice.include(choice, held_bytes)
            yield self._event_of(payloads)

    def _event_of(self, payloads: Sequence[Any]) -> bytes:
        self._last_encoded = payloads[-1]
        event = self.framing.event
        return event(payloads[0]) if len(payloads) == 1 else b"".join(map(event, payloads))

    def _events(self, payloads: Iterable[Any]) -> Iterator[bytes]:
        """Yields an event for each payload; they have no tokens."""
        for payload in payloads:
            event = self.framing.event(payload)
            self._last_encoded = payload
            yield event


class SentPlace:
    """How far a stream was sent, of which everything before is in its events.

    While events include everything that was taken, in the log's order (`in_order`), that is a
    cursor. Text that is held back, and several choices, are counted by choice
    (`api.jobs.sent_choices.SentChoices`).
    """

    def __init__(self) -> None:
        self._cursor = START  # everything before it was sent
        self._ordered_end = START  # of what events include
        self._taken_end = START  # after it: of tokens without text, which the next event includes
        self._counts: Any = None  # SentChoices; None: in order

    @property
    def in_order(self) -> bool:
        """Returns whether events include everything that was taken, in the log's order."""
        return self._counts is None

    @property
    def has_pending(self) -> bool:
        """Returns whether tokens or text were taken that no event includes."""
        if self._counts is None:
            return self._taken_end != self._ordered_end
        return bool(self._counts.has_pending)

    @property
    def resume_point(self) -> ResumePoint:
        """Returns the offset from which a reader of the sent events resumes."""
        if self._counts is None:
            return ResumePoint(self._cursor)
        point: ResumePoint = self._counts.resume_point
        return point

    @property
    def by_choice(self) -> Any:
        """Returns the counts of each choice, from here on until all of them was sent."""
        if self._counts is None:
            self._counts = self._new_counts(self._cursor, self._ordered_end, self._taken_end)
        return self._counts

    @cached_property
    def _new_counts(self) -> Any:
        return load_part("sent_choices").SentChoices

    def include_in_order(self, end: Cursor) -> None:
        """Records that an event includes everything up to `end`, all of it choice 0's.

        Only while `in_order`.
        """
        self._ordered_end = self._taken_end = end

    def take_in_order(self, end: Cursor) -> None:
        """Records that everything up to `end` was taken, tokens of choice 0 without text.

        Only while `in_order`.
        """
        self._taken_end = end

    def include_all(self) -> None:
        """Records that events include everything that was taken."""
        if self._counts is None:
            self._ordered_end = self._taken_end
        else:
            self._counts.include_all()

    def mark_sent(self) -> None:
        """Records that every event was sent."""
        if self._counts is None:
            self._cursor = self._ordered_end
            return
        self._counts.mark_sent()
        if self._counts.is_sent:
            self._cursor = self._ordered_end = self._taken_end = self._counts.cursor
            self._counts = None


# Deltas are split between the log and a formatter. Under load a worker appends the tokens of
# several steps as one log entry: one round trip, one frame. The entry's segments show where each
# step's part ends, so a client still gets an event per step.

FEW_EVENTS = 8  # that may wait for a reader that keeps up


MANY_TOKENS = 128  # longest delta that is encoded in one go


MANY_CHARS = 16_384  # longest delta that is parsed in one go: tens of milliseconds at most


def split_by_step(delta: Delta, num_waiting: int) -> Sequence[Delta]:
    """Returns a delta per step while the reader keeps up, else as few as possible, which is less
    work and fewer bytes for both sides. `num_waiting`: events that the reader has not read."""
    return split_by_segment(delta) if num_waiting <= FEW_EVENTS else split_long(delta)


def split_by_segment(delta: Delta) -> Sequence[Delta]:
    """Returns one delta per segment, in order: the log as if it had been cut there.

    Raises ValueError when a segment ends within a character.
    """
    segments = delta.segments
    if segments is None or len(segments) == 1:
        return (delta,)
    return _cut(delta, [(segment,) for segment in segments])


def plain_pieces(delta: Delta, num_waiting: int) -> Sequence[tuple[Sequence[int], str]]:
    """Returns token ids and text of what `split_by_step` returns, without a Delta for each.

    Nothing where that is not all that there is to know: where another choice has a part, one
    has no text, or ends its choice, or the delta is long. Raises ValueError as `split_by_segment`.
    """
    token_ids, text, segments = delta.token_ids, delta.text, delta.segments
    if not text or len(token_ids) > MANY_TOKENS:
        return ()
    if segments is None:
        return ((token_ids, text),)
    for choice, _, num_bytes, finish_reason, _ in segments:
        if choice or not num_bytes or finish_reason is not None:
            return ()
    if num_waiting > FEW_EVENTS:
        return ((token_ids, text),)
    pieces, token, byte = [], 0, 0
    encoded = None if text.isascii() else text.encode()  # else bytes are characters
    for _, num_tokens, num_bytes, _, _ in segments:
        last_token, last_byte = token + num_tokens, byte + num_bytes
        part = text[byte:last_byte] if encoded is None else encoded[byte:last_byte].decode()
        pieces.append((token_ids[token:last_token], part))
        token, byte = last_token, last_byte
    return pieces


def split_long(delta: Delta) -> Sequence[Delta]:
    """Returns the delta cut between segments into parts of about MANY_TOKENS.

    Raises ValueError when a segment ends within a character.
    """
    segments = delta.segments
    if segments is None or is_short(delta):
        return (delta,)
    runs: list[list[Segment]] = [[]]
    num_tokens = 0
    for segment in segments:
        if num_tokens + segment.num_tokens > MANY_TOKENS and runs[-1]:
            runs.append([])
            num_tokens = 0
        runs[-1].append(segment)
        num_tokens += segment.num_tokens
    return _cut(delta, runs)


def is_short(delta: Delta) -> bool:
    """Returns whether it can be encoded in one go: a token may have twenty alternatives."""
    return len(delta.token_ids) <= MANY_TOKENS


def _cut(delta: Delta, runs: Sequence[Sequence[Segment]]) -> Sequence[Delta]:
    """Returns one delta per run of its segments."""
    text, cursor = delta.text, delta.start
    is_ascii = text.isascii()  # then bytes are characters
    encoded = b"" if is_ascii else text.encode()
    pieces, first_token, first_byte = [], 0, 0
    for run in runs:
        num_tokens, num_bytes = sums_of(run)
        last_token, last_byte = first_token + num_tokens, first_byte + num_bytes
        end = Cursor(cursor.num_tokens + num_tokens, cursor.num_bytes + num_bytes)
        pieces.append(
            Delta(
                cursor,
                end,
                delta.token_ids[first_token:last_token],
                text[first_byte:last_byte] if is_ascii else encoded[first_byte:last_byte].decode(),
                None if delta.logprobs is None else delta.logprobs[first_token:last_token],
                None if len(run) == 1 and _is_plain(run[0]) else tuple(run),
            )
        )
        cursor, first_token, first_byte = end, last_token, last_byte
    return pieces


def _is_plain(segment: Segment) -> bool:
    """Returns whether a delta without segments means the same."""
    return segment.choice == 0 and segment.finish_reason is None


def delta_of(part: ChoiceDelta) -> Delta:
    """Returns `part` as a delta of one segment without a place in the log: for formatters alone."""
    num_tokens, num_bytes = len(part.token_ids), len(part.text.encode())
    segment = Segment(part.choice, num_tokens, num_bytes, part.finish_reason, part.stop_reason)
    end = Cursor(num_tokens, num_bytes)
    return Delta(START, end, part.token_ids, part.text, part.logprobs, (segment,))
