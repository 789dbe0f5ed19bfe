"""ReaderPosition: where one reader of a stream is, and what it got last.

The log and the channel may repeat what a reader has (a worker sends again after a lost reply, a log
was rolled back and grows anew). Repetitions are trimmed by cursor arithmetic; the kept tail of what
was delivered is compared with them, so that another history is noticed and never spliced on. Of a
job with several choices the same goes for whose tokens and text they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.messages import Cursor, Delta, Segment
from shared.transport.wire import chain_links

MAX_TOKENS = 1024
MAX_BYTES = 16_384


class Diverged(Exception):
    """The log says something else than what this reader was given."""


class ReaderPosition:
    """The reader's cursor and a bounded tail of the tokens and text before it."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.last_start = (
            cursor  # where the last delivered delta began: from here it can be compared
        )
        self._links: list[int] = []  # tokens, each with its choice
        self._text = b""
        self._ended: set[int] = set()  # choices whose end was delivered

    def take(self, delta: Delta) -> Delta | None:
        """What of `delta` is new, moving the cursor to its end; None when nothing is.

        `delta` must not leave a gap (see `is_gap`). Raises Diverged when the overlap
        differs from what was delivered.
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
        """True when nothing of `delta` lies after the cursor."""
        end, cursor = delta.end, self.cursor
        return end.num_tokens <= cursor.num_tokens and end.num_bytes <= cursor.num_bytes

    def is_gap(self, delta: Delta) -> bool:
        """True when something between the cursor and `delta` is missing."""
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
        """What of a delta's segments lies after the cursor.

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
            raise Diverged(f"{delta.start} to {delta.end} differs from what was delivered")

    def _advance(self, delta: Delta, text: bytes) -> None:
        self.last_start, self.cursor = self.cursor, delta.end
        self._links.extend(chain_links(delta.token_ids, delta.segments))
        if len(self._links) > 2 * MAX_TOKENS:
            del self._links[:-MAX_TOKENS]
        self._text += text
        if len(self._text) > 2 * MAX_BYTES:
            self._text = self._text[-MAX_BYTES:]
        for segment in delta.segments or ():
            if segment.finish_reason is not None:
                self._ended.add(segment.choice)


def _agree(
    had: tuple[int, ...] | bytes, had_from: int, got: tuple[int, ...] | bytes, got_from: int
) -> bool:
    """Whether two slices of one sequence are equal where they overlap."""
    low = max(had_from, got_from)
    high = min(had_from + len(had), got_from + len(got))
    if low >= high:
        return True
    return had[low - had_from : high - had_from] == got[low - got_from : high - got_from]
