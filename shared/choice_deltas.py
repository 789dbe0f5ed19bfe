"""Deltas divided by choice, and what identifies their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.messages import Delta, FinishReason, Segment, TokenLogprob

_CHOICE_SHIFT = 32  # token ids are below 2**31


class ChoiceDelta(NamedTuple):
    """One choice's part of a delta."""

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # set on the last of a choice; see Delta.segments
    stop_reason: str | int | None = None


def segment_deltas(delta: Delta) -> tuple[ChoiceDelta, ...]:
    """Returns the delta's segments in their order; a choice may come several times.

    Raises ValueError when a segment ends within a character.
    """
    if delta.segments is None:
        return (ChoiceDelta(0, delta.token_ids, delta.text, delta.logprobs),)
    parts = []
    text, first_token, first_byte = delta.text.encode(), 0, 0
    for segment in delta.segments:
        tokens = slice(first_token, first_token + segment.num_tokens)
        end_byte = first_byte + segment.num_bytes
        parts.append(
            ChoiceDelta(
                segment.choice,
                delta.token_ids[tokens],
                text[first_byte:end_byte].decode(),
                None if delta.logprobs is None else delta.logprobs[tokens],
                segment.finish_reason,
                segment.stop_reason,
            )
        )
        first_token, first_byte = tokens.stop, end_byte
    return tuple(parts)


def choice_deltas(delta: Delta) -> tuple[ChoiceDelta, ...]:
    """Returns the delta's choices, each once, in the order of their first segments.

    Raises ValueError as `segment_deltas`.
    """
    parts: dict[int, ChoiceDelta] = {}
    for part in segment_deltas(delta):
        before = parts.get(part.choice)
        if before is not None:
            part = part._replace(
                token_ids=before.token_ids + part.token_ids,
                text=before.text + part.text,
                logprobs=None
                if before.logprobs is None
                else before.logprobs + (part.logprobs or ()),
            )
        parts[part.choice] = part
    return tuple(parts.values())


def sums_of(segments: Iterable[Segment]) -> tuple[int, int]:
    """Returns the tokens and the bytes of all segments."""
    tokens = num_bytes = 0
    for segment in segments:
        tokens += segment.num_tokens
        num_bytes += segment.num_bytes
    return tokens, num_bytes


def chain_links(token_ids: Sequence[int], segments: Sequence[Segment] | None) -> Sequence[int]:
    """Returns the items of a log's hash chain: each token with its choice.

    The links of choice 0 are its tokens. Equal tokens of other choices are other links, so two
    histories that divide the same tokens otherwise never have one chain.
    """
    for segment in segments or ():
        if segment.choice:
            return tuple(_links(token_ids, segments or ()))
    return token_ids


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
