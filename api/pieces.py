"""Pieces: a delta told as the worker's steps gave it, however many of them one log entry holds.

Under load a worker gathers the tokens of several steps into one entry: one round trip, one frame.
The entry's segments say where each step's part ends, so a client still gets an event for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import Cursor, Delta, Segment

FEW_EVENTS = 8  # that may wait for a reader who keeps up


def told(delta: Delta, num_waiting: int) -> Sequence[Delta]:
    """How a reader for whom so many events wait is told a delta: piece by piece while it keeps up,
    else whole, which is less work and fewer bytes for both sides."""
    return pieces_of(delta) if num_waiting <= FEW_EVENTS else (delta,)


def pieces_of(delta: Delta) -> Sequence[Delta]:
    """One delta for each of its segments, in order: the log as if it had been cut there.

    Raises ValueError when a segment ends within a character.
    """
    segments = delta.segments
    if segments is None or len(segments) == 1:
        return (delta,)
    text, cursor = delta.text, delta.start
    is_ascii = text.isascii()  # then bytes are characters
    encoded = b"" if is_ascii else text.encode()
    pieces, first_token, first_byte = [], 0, 0
    for segment in segments:
        last_token, last_byte = first_token + segment.num_tokens, first_byte + segment.num_bytes
        end = Cursor(cursor.num_tokens + segment.num_tokens, cursor.num_bytes + segment.num_bytes)
        pieces.append(
            Delta(
                cursor,
                end,
                delta.token_ids[first_token:last_token],
                text[first_byte:last_byte] if is_ascii else encoded[first_byte:last_byte].decode(),
                None if delta.logprobs is None else delta.logprobs[first_token:last_token],
                None if _is_plain(segment) else (segment,),
            )
        )
        cursor, first_token, first_byte = end, last_token, last_byte
    return pieces


def _is_plain(segment: Segment) -> bool:
    """What a delta without segments says too."""
    return segment.choice == 0 and segment.finish_reason is None
