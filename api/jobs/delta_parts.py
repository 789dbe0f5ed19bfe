"""Pieces: a delta told as the worker's steps gave it, however many of them one log entry holds.

Under load a worker gathers the tokens of several steps into one entry: one round trip, one frame.
The entry's segments say where each step's part ends, so a client still gets an event for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import Cursor, Delta, Segment
from shared.transport.wire import sums_of

FEW_EVENTS = 8  # that may wait for a reader who keeps up
MANY_TOKENS = 128  # of a delta that is written in one go


def told(delta: Delta, num_waiting: int) -> Sequence[Delta]:
    """How a reader for whom so many events wait is told a delta: piece by piece while it keeps up,
    else as whole as it may be, which is less work and fewer bytes for both sides."""
    return pieces_of(delta) if num_waiting <= FEW_EVENTS else parts_of(delta)


def pieces_of(delta: Delta) -> Sequence[Delta]:
    """One delta for each of its segments, in order: the log as if it had been cut there.

    Raises ValueError when a segment ends within a character.
    """
    segments = delta.segments
    if segments is None or len(segments) == 1:
        return (delta,)
    return _cut(delta, [(segment,) for segment in segments])


def parts_of(delta: Delta) -> Sequence[Delta]:
    """The delta cut between segments into parts of about MANY_TOKENS; itself where it is short.

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
    """Whether it can be written in one go: its tokens may have twenty alternatives each."""
    return len(delta.token_ids) <= MANY_TOKENS


def _cut(delta: Delta, runs: Sequence[Sequence[Segment]]) -> Sequence[Delta]:
    """One delta for each run of its segments."""
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
    """What a delta without segments says too."""
    return segment.choice == 0 and segment.finish_reason is None
