"""ReaderPosition and ResumePoint: the offset of a stream's reader, and where it resumes.

The log and the channel may repeat events that a reader has: a worker sends again after a lost
reply, or a log was rolled back and grows again. Repetitions are trimmed by cursor arithmetic and
compared with the kept tail of the delivered events, so that another history is noticed and never
spliced on. With several choices, the choice of each token and text is compared, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.choice_deltas import chain_links
from shared.messages import MAX_CHOICES, START, Cursor, Delta, Segment

MAX_TOKENS = 1024
MAX_BYTES = 16_384
_AHEAD = re.compile(r"([0-9]{1,3})-([0-9]{1,12})-([0-9]{1,12})(e?)")
_AHEAD_CHARS = 31  # of one choice in the text form, at most


class Diverged(Exception):
    """The log differs from the events that its reader got."""


class ReaderPosition:
    """The reader's cursor and a bounded tail of the tokens and text before it."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.last_start = cursor  # of the delta that was delivered last: it can be compared
        self._links: list[int] = []  # tokens, each with its choice
        self._text = bytearray()
        self._ended: set[int] = set()  # choices whose end was delivered

    def take(self, delta: Delta) -> Delta | None:
        """Returns the new part of `delta`, and moves the cursor to its end; None: nothing is new.

        `delta` must not leave a gap (see `is_gap`). Raises Diverged when the overlap
        differs from the delivered part.
        """
        cursor, start, end = self.cursor, delta.start, delta.end
        text = delta.text.encode()
        if start == cursor and end != cursor:
            if self._repeats_an_end(delta):
                return self._trimmed(delta, text)
            self._advance(delta, text)
            return delta
        self._compare(delta, text)
        if self.has(delta):
            return None
        if end.num_tokens < cursor.num_tokens or end.num_bytes < cursor.num_bytes:
            raise Diverged(f"{start} to {end} does not continue {cursor}")
        return self._trimmed(delta, text)

    def has(self, delta: Delta) -> bool:
        """Returns whether nothing of `delta` lies after the cursor."""
        end, cursor = delta.end, self.cursor
        return end.num_tokens <= cursor.num_tokens and end.num_bytes <= cursor.num_bytes

    def is_gap(self, delta: Delta) -> bool:
        """Returns whether something between the cursor and `delta` is missing."""
        start = delta.start
        return start.num_tokens > self.cursor.num_tokens or start.num_bytes > self.cursor.num_bytes

    def _repeats_an_end(self, delta: Delta) -> bool:
        return bool(self._ended) and any(
            segment.finish_reason is not None and segment.choice in self._ended
            for segment in delta.segments or ()
        )

    def _trimmed(self, delta: Delta, text: bytes) -> Delta:
        cursor = self.cursor
        skip = cursor.num_tokens - delta.start.num_tokens
        try:
            rest = text[cursor.num_bytes - delta.start.num_bytes :].decode()
        except UnicodeDecodeError as error:
            raise Diverged(f"{cursor} cuts a character of the log in two") from error
        segments = None
        if delta.segments is not None:
            segments = tuple(self._rest_of(delta.segments, delta.start))
        fresh = Delta(
            start=cursor,
            end=delta.end,
            token_ids=delta.token_ids[skip:],
            text=rest,
            logprobs=None if delta.logprobs is None else delta.logprobs[skip:],
            segments=segments,
        )
        self._advance(fresh, rest.encode())
        return fresh

    def _rest_of(self, segments: Sequence[Segment], start: Cursor) -> Iterator[Segment]:
        """Yields the parts of a delta's segments after the cursor.

        A choice's end comes with its last token. One that has none is a point: on the cursor it is
        new unless that choice's end was delivered.
        """
        tokens_had = self.cursor.num_tokens - start.num_tokens
        bytes_had = self.cursor.num_bytes - start.num_bytes
        for segment in segments:
            num_tokens = segment.num_tokens - min(max(tokens_had, 0), segment.num_tokens)
            num_bytes = segment.num_bytes - min(max(bytes_had, 0), segment.num_bytes)
            is_had = tokens_had > 0 or bytes_had > 0 or segment.choice in self._ended
            is_point = segment.num_tokens == segment.num_bytes == 0
            if num_tokens or num_bytes or (is_point and not is_had):
                yield segment._replace(num_tokens=num_tokens, num_bytes=num_bytes)
            tokens_had -= segment.num_tokens
            bytes_had -= segment.num_bytes

    def _compare(self, delta: Delta, text: bytes) -> None:
        link_base = self.cursor.num_tokens - len(self._links)
        byte_base = self.cursor.num_bytes - len(self._text)
        links = tuple(chain_links(delta.token_ids, delta.segments))
        same = _agree(tuple(self._links), link_base, links, delta.start.num_tokens) and _agree(
            self._text, byte_base, text, delta.start.num_bytes
        )
        if not same:
            raise Diverged(f"{delta.start} to {delta.end} differs from the delivered part")

    def _advance(self, delta: Delta, text: bytes) -> None:
        self.last_start, self.cursor = self.cursor, delta.end
        self._links.extend(chain_links(delta.token_ids, delta.segments))
        if len(self._links) > 2 * MAX_TOKENS:
            del self._links[:-MAX_TOKENS]
        self._text += text
        if len(self._text) > 2 * MAX_BYTES:
            del self._text[:-MAX_BYTES]
        for segment in delta.segments or ():
            if segment.finish_reason is not None:
                self._ended.add(segment.choice)


def _agree(
    had: tuple[int, ...] | bytearray, had_from: int, got: tuple[int, ...] | bytes, got_from: int
) -> bool:
    """Returns whether two slices of one sequence are equal where they overlap."""
    low = max(had_from, got_from)
    high = min(had_from + len(had), got_from + len(got))
    if low >= high:
        return True
    return had[low - had_from : high - had_from] == got[low - got_from : high - got_from]


class Extent(NamedTuple):
    """So much of a choice: tokens, UTF-8 bytes of text, and whether its end is among it."""

    num_tokens: int = 0
    num_bytes: int = 0
    has_end: bool = False


NOTHING = Extent()


def extent_of(delta: Delta) -> Extent:
    """Returns how much of its choice a delta of one choice is."""
    segments, start, end = delta.segments, delta.start, delta.end
    has_end = segments is not None and segments[-1].finish_reason is not None
    return Extent(len(delta.token_ids), end.num_bytes - start.num_bytes, has_end)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A reader has everything before `cursor`, and the extent of each choice in `ahead` after it.

    With several choices, events are not sent in the order of the log: tokens of one choice may be
    held back while those of another are sent. A cursor alone would repeat or lose some of them.

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


def resume_hint(job_id: str, resume_point: ResumePoint) -> str:
    """Returns a sentence for a reader whose stream ends before its job does."""
    return (
        f"GET /v1/jobs/{job_id}/stream with the header 'Last-Event-ID: {resume_point}' continues "
        "from here."
    )
