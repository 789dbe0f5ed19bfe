"""Splits and batches deltas between the log and a formatter.

Under load a worker appends the tokens of several steps as one log entry: one round trip, one frame.
The entry's segments show where each step's part ends, so a client still gets an event per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shared.choice_deltas import ChoiceDelta, segment_deltas, sums_of
from shared.messages import START, Cursor, Delta, Segment

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


class BatchedDeltas:
    """Joins a choice's tokens to one delta per `interval` of them, or per MANY_CHARS of their text:
    its first text at once, and the rest with its end. As vLLM's `--stream-interval`.

    The joined deltas have one segment each and no place in the log: for formatters alone.
    """

    def __init__(self, interval: int) -> None:
        """Takes the interval in tokens, at least 1."""
        self._interval = interval
        self._held: dict[int, list[ChoiceDelta]] = {}  # by choice
        self._num_held: dict[int, tuple[int, int]] = {}  # tokens, and characters of their text
        self._begun: set[int] = set()

    def push(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yields the deltas that these complete. Raises ValueError as `segment_deltas`."""
        for delta in deltas:
            for part in segment_deltas(delta):
                yield from self._take(part)

    def rest(self) -> Iterator[Delta]:
        """Yields everything that is held, at the end of the stream."""
        for choice in sorted(self._held):
            yield self._joined(choice)

    def _take(self, part: ChoiceDelta) -> Iterator[Delta]:
        choice = part.choice
        self._held.setdefault(choice, []).append(part)
        num_tokens, num_chars = self._num_held.get(choice, (0, 0))
        num_tokens, num_chars = num_tokens + len(part.token_ids), num_chars + len(part.text)
        self._num_held[choice] = (num_tokens, num_chars)
        is_full = num_tokens >= self._interval or num_chars >= MANY_CHARS
        if is_full or choice not in self._begun or part.finish_reason is not None:
            if part.text:
                self._begun.add(choice)
            yield self._joined(choice)

    def _joined(self, choice: int) -> Delta:
        parts = self._held.pop(choice)
        del self._num_held[choice]
        token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
        text = "".join(part.text for part in parts)
        logprobs = tuple(one for part in parts for one in part.logprobs or ())
        has_logprobs = any(part.logprobs is not None for part in parts)
        return delta_of(
            parts[-1]._replace(
                token_ids=token_ids, text=text, logprobs=logprobs if has_logprobs else None
            )
        )


def delta_of(part: ChoiceDelta) -> Delta:
    """Returns `part` as a delta of one segment without a place in the log: for formatters alone."""
    num_tokens, num_bytes = len(part.token_ids), len(part.text.encode())
    segment = Segment(part.choice, num_tokens, num_bytes, part.finish_reason, part.stop_reason)
    end = Cursor(num_tokens, num_bytes)
    return Delta(START, end, part.token_ids, part.text, part.logprobs, (segment,))
