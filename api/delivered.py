"""Delivered: where one reader of a stream is, and what it got last.

The log and the channel may repeat what a reader has (a worker sends again after a lost reply, a log
was rolled back and grows anew). Repetitions are trimmed by cursor arithmetic; the kept tail of what
was delivered is compared with them, so that another history is noticed and never spliced on.
"""

from __future__ import annotations

from shared.messages import Cursor, Delta

MAX_TOKENS = 1024
MAX_BYTES = 16_384


class Diverged(Exception):
    """The log says something else than what this reader was given."""


class Delivered:
    """The reader's cursor and a bounded tail of the tokens and text before it."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.last_start = (
            cursor  # where the last delivered delta began: from here it can be compared
        )
        self._token_ids: list[int] = []
        self._text = b""

    def take(self, delta: Delta) -> Delta | None:
        """What of `delta` is new, moving the cursor to its end; None when nothing is.

        `delta` must not leave a gap (see `is_gap`). Raises Diverged when the overlap
        differs from what was delivered.
        """
        cursor, start, end = self.cursor, delta.start, delta.end
        text = delta.text.encode()
        if start == cursor and end != cursor:
            self._advance(delta.token_ids, text, end)
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

    def _trimmed(self, delta: Delta, text: bytes) -> Delta:
        cursor = self.cursor
        skip = cursor.num_tokens - delta.start.num_tokens
        try:
            rest = text[cursor.num_bytes - delta.start.num_bytes :].decode()
        except UnicodeDecodeError as error:
            raise Diverged(f"{cursor} cuts a character of the log in two") from error
        fresh = Delta(
            start=cursor,
            end=delta.end,
            token_ids=delta.token_ids[skip:],
            text=rest,
            logprobs=None if delta.logprobs is None else delta.logprobs[skip:],
        )
        self._advance(fresh.token_ids, rest.encode(), delta.end)
        return fresh

    def _compare(self, delta: Delta, text: bytes) -> None:
        token_base = self.cursor.num_tokens - len(self._token_ids)
        byte_base = self.cursor.num_bytes - len(self._text)
        same = _agree(
            tuple(self._token_ids), token_base, delta.token_ids, delta.start.num_tokens
        ) and _agree(self._text, byte_base, text, delta.start.num_bytes)
        if not same:
            raise Diverged(f"{delta.start} to {delta.end} differs from what was delivered")

    def _advance(self, token_ids: tuple[int, ...], text: bytes, end: Cursor) -> None:
        self.last_start, self.cursor = self.cursor, end
        self._token_ids.extend(token_ids)
        if len(self._token_ids) > 2 * MAX_TOKENS:
            del self._token_ids[:-MAX_TOKENS]
        self._text += text
        if len(self._text) > 2 * MAX_BYTES:
            self._text = self._text[-MAX_BYTES:]


def _agree(
    had: tuple[int, ...] | bytes, had_from: int, got: tuple[int, ...] | bytes, got_from: int
) -> bool:
    """Whether two slices of one sequence are equal where they overlap."""
    low = max(had_from, got_from)
    high = min(had_from + len(had), got_from + len(got))
    if low >= high:
        return True
    return had[low - had_from : high - had_from] == got[low - got_from : high - got_from]
