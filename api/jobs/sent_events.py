"""SentEvents: encodes a stream's events in its dialect and tracks the offset that was sent.

A stream may be cut while a write waits for a slow client, which never gets it then. So a reader
resumes after the events that were sent, not after those that were encoded or read from the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from api.errors import ApiError
from api.generation.formatter import Formatter, PlainEvent
from api.http.sse import whole_events
from api.jobs.reader_position import NOTHING, Extent, ResumePoint, resume_hint
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
        self._choices = SentChoices()
        self._counts_by_cursor = False  # choice 0 has started, and nothing is batched
        self._plain_event: PlainEvent | None = None  # of such a stream
        self._has_delta = False
        self._last_encoded: Any = None
        self._last_sent: Any = None  # payload

    @property
    def resume_point(self) -> ResumePoint:
        """Returns the offset from which a reader of the sent events misses and repeats nothing."""
        return self._choices.resume_point

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
        plain_event = self._plain_event if self._choices.in_order else None
        if plain_event is not None and (pieces := plain_pieces(delta, num_waiting)):
            self._choices.include_in_order(delta.end)
            yield b"".join(starmap(plain_event, pieces))
            return
        for piece in split_by_step(delta, num_waiting):
            if self._counts_by_cursor and piece.segments is None and self._choices.in_order:
                if payloads := self._payloads_of(piece):
                    yield self._event_of(payloads)
                continue
            if self._counts:
                self._choices.log(piece)
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
        is_one, events = is_finished and self._choices.has_pending, []
        for payload in self._last_payloads(end):
            for event in self._encoded(payload, is_small=is_small):
                if event:
                    self._last_encoded = payload
                if event and is_one:
                    events.append(event)
                yield b"" if is_one else event
        if is_one:
            self._choices.include_all()
            yield b"".join(events)

    def _encoded(self, payload: Any, *, is_small: bool) -> Iterable[bytes]:
        return (self.framing.event(payload),) if is_small else whole_events(self.framing, payload)

    def failed(self, error: ApiError) -> bytes:
        return self.framing.event(self._formatter.failed(error, self._last_sent))

    def mark_sent(self) -> None:
        self._choices.mark_sent()
        self._last_sent = self._last_encoded

    def _last_payloads(self, end: Finished | Failed) -> Sequence[Any]:
        if isinstance(end, Finished):
            return self._formatter.finished(end)
        return self._formatter.job_failed(end, delivered=self._has_delta)

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
        if payloads and not held_bytes:
            self._choices.include_in_order(piece.end)
            return payloads
        self._choices.log(piece)
        self._choices.take(0, extent_of(piece))
        if payloads:
            self._choices.include(0, held_bytes)
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
        self._choices.take(choice, extent)
        payloads = self._formatter.delta(part)
        if choice == 0 and self._batched is None and not self._counts_by_cursor:
            self._counts_by_cursor = True
            self._plain_event = self._formatter.plain_event()
        if payloads:
            held_bytes = 0 if extent.has_end else self._formatter.held_bytes(choice)
            self._choices.include(choice, held_bytes)
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


class _Part(NamedTuple):
    """A segment of the log."""

    choice: int
    upto: Extent  # of its choice, from the start of the log
    end: Cursor


class SentChoices:
    """Counts, for each choice, the tokens and bytes that were logged, taken from the log, included
    in events, and sent. The stream may be cut between any two of these steps.

    Most streams have one choice, and hold nothing back. While events include everything that was
    taken, in the log's order (`in_order`), one cursor replaces these counts: cheaper per token.
    """

    def __init__(self) -> None:
        self._cursor = START  # everything before it was sent
        self._ordered_end: Cursor | None = START  # of what events include; None: count by choice
        self._passed: dict[int, Extent] = {}  # of each choice, before the cursor
        self._log: deque[_Part] = deque()  # from the cursor on
        self._logged: dict[int, Extent] = {}  # to the end of `_log`
        self._taken: dict[int, Extent] = {}
        self._included: dict[int, Extent] = {}
        self._sent: dict[int, Extent] = {}

    @property
    def in_order(self) -> bool:
        """Returns whether events include everything that was taken, in the log's order."""
        return self._ordered_end is not None

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
        return ResumePoint(self._cursor, ahead)

    def include_in_order(self, end: Cursor) -> None:
        """Records that an event includes everything up to `end`, all of it choice 0's.

        Only while `in_order`.
        """
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
        if self._ordered_end is not None:
            self._cursor = self._ordered_end
            return
        self._sent.update(self._included)
        while self._log and self._has(self._log[0]):
            part = self._log.popleft()
            self._passed[part.choice] = part.upto
            self._cursor = part.end
        if not self._log and self._taken == self._included:
            for sums in (self._passed, self._logged, self._taken, self._included, self._sent):
                sums.clear()
            self._ordered_end = self._cursor

    def _count_choices(self) -> None:
        """Starts to count by choice: included events that were not sent belong to choice 0."""
        if self._ordered_end is None:
            return
        begin, end = self._cursor, self._ordered_end
        self._ordered_end = None
        if begin != end:
            extent = Extent(end.num_tokens - begin.num_tokens, end.num_bytes - begin.num_bytes)
            self._log.append(_Part(0, extent, end))
            self._logged[0] = self._taken[0] = self._included[0] = extent

    def _has(self, part: _Part) -> bool:
        sent, upto = self._sent.get(part.choice, NOTHING), part.upto
        return (
            sent.num_tokens >= upto.num_tokens
            and sent.num_bytes >= upto.num_bytes
            and sent.has_end >= upto.has_end
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
