"""Segments on the wire: the pieces of a delta, and which choice of its job each belongs to.

JSON without '|': `[[choice, tokens, bytes, finish reason, stop reason], ...]`, where what is None
at the end of a segment is left out; '' for a delta without segments (all of it is choice 0's).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from shared.messages import Segment

_decoder = msgspec.json.Decoder(tuple[Segment, ...])

_CHOICE_SHIFT = 32  # token ids are below 2**31


def encode_segments(segments: Sequence[Segment] | None) -> str:
    """'' for None."""
    if segments is None:
        return ""
    if all(segment[3:] == (None, None) for segment in segments):
        return f"[{','.join(f'[{s.choice},{s.num_tokens},{s.num_bytes}]' for s in segments)}]"
    rows = [_without_tail(segment) for segment in segments]
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return text.replace("|", "\\u007c")  # only ever inside a string


def decode_segments(text: bytes) -> tuple[Segment, ...] | None:
    """Raises ValueError for what is not a list of segments."""
    return _decoder.decode(text) if text else None


def sums_of(segments: Iterable[Segment]) -> tuple[int, int]:
    """Tokens and bytes of all of them together."""
    tokens = num_bytes = 0
    for segment in segments:
        tokens += segment.num_tokens
        num_bytes += segment.num_bytes
    return tokens, num_bytes


def chain_links(token_ids: Sequence[int], segments: Sequence[Segment] | None) -> Sequence[int]:
    """What the hash chain over a log runs over: each token with its choice.

    The links of choice 0 are its tokens. Equal tokens of other choices are other links, so two
    histories that divide the same tokens otherwise never have one chain.
    """
    if segments is None:
        return token_ids
    return tuple(_links(token_ids, segments))


def _links(token_ids: Sequence[int], segments: Sequence[Segment]) -> Iterator[int]:
    first = 0
    for segment in segments:
        own = token_ids[first : first + segment.num_tokens]
        if segment.choice:
            place = segment.choice << _CHOICE_SHIFT
            yield from (place + token_id for token_id in own)
        else:
            yield from own
        first += segment.num_tokens


def _without_tail(segment: Segment) -> tuple[object, ...]:
    if segment.stop_reason is not None:
        return segment
    return segment[:4] if segment.finish_reason is not None else segment[:3]
