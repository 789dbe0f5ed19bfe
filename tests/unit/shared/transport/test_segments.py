"""Segments: what is written is read back, and a delta comes apart as it was put together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.choice_deltas import ChoiceDelta, chain_links, choice_deltas, segment_deltas, sums_of
from shared.messages import START, Cursor, Delta, FinishReason, Segment, TokenLogprob
from shared.transport.wire import (
    chain_hash,
    decode_entry,
    decode_frame,
    decode_segments,
    encode_logprobs,
    encode_segments,
    encode_token_ids,
)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
parts = st.builds(
    ChoiceDelta,
    choice=st.integers(0, 127),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    text=words,
    logprobs=st.none(),
    finish_reason=st.none() | st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)),
    stop_reason=st.none() | st.integers(0, 2**31 - 1) | words,
)


def put_together(pieces: list[ChoiceDelta], *, with_logprobs: bool = False) -> Delta:
    segments = tuple(
        Segment(p.choice, len(p.token_ids), len(p.text.encode()), p.finish_reason, p.stop_reason)
        for p in pieces
    )
    token_ids = tuple(itertools.chain.from_iterable(p.token_ids for p in pieces))
    logprobs = tuple(TokenLogprob(one, -1.0) for one in token_ids) if with_logprobs else None
    end = Cursor(*sums_of(segments))
    return Delta(START, end, token_ids, "".join(p.text for p in pieces), logprobs, segments)


@given(st.lists(parts, max_size=6), st.booleans())
def test_a_delta_of_several_choices_survives_the_wire(
    pieces: list[ChoiceDelta], with_logprobs: bool
) -> None:
    delta = put_together(pieces, with_logprobs=with_logprobs)
    segments = encode_segments(delta.segments)
    assert "|" not in segments
    assert decode_segments(segments.encode()) == delta.segments
    ids, lp = encode_token_ids(delta.token_ids).encode(), encode_logprobs(delta.logprobs)
    fields = {b"t": ids, b"d": delta.text.encode(), b"lp": lp, b"c": segments.encode()}
    assert decode_entry(str(delta.end).encode(), fields) == delta
    numbers = b"0|%d|%d" % delta.end
    frame = b"|".join((b"C", numbers, segments.encode(), ids, lp, delta.text.encode()))
    assert decode_frame(frame) == delta


@given(st.lists(parts, max_size=6))
def test_segments_are_read_in_their_order_and_choices_once_each(pieces: list[ChoiceDelta]) -> None:
    delta = put_together(pieces)
    assert segment_deltas(delta) == tuple(pieces)
    by_choice = choice_deltas(delta)
    assert [part.choice for part in by_choice] == list(dict.fromkeys(p.choice for p in pieces))
    for part in by_choice:
        own = [p for p in pieces if p.choice == part.choice]
        assert part.text == "".join(p.text for p in own)
        assert part.token_ids == tuple(itertools.chain.from_iterable(p.token_ids for p in own))
        assert part[4:] == own[-1][4:]


def test_logprobs_go_with_their_tokens() -> None:
    pieces = [ChoiceDelta(0, (1,), "a"), ChoiceDelta(1, (2, 3), "b"), ChoiceDelta(0, (4,), "c")]
    delta = put_together(pieces, with_logprobs=True)
    zeroth, first = choice_deltas(delta)
    assert [entry.token_id for entry in zeroth.logprobs or ()] == [1, 4]
    assert [entry.token_id for entry in first.logprobs or ()] == [2, 3]


def test_a_delta_without_segments_is_the_zeroth_choices() -> None:
    delta = Delta(START, Cursor(1, 2), (5,), "é", (TokenLogprob(5, -1.0),))
    assert choice_deltas(delta) == (ChoiceDelta(0, (5,), "é", delta.logprobs),)
    assert encode_segments(None) == ""
    assert decode_segments(b"") is None


def test_only_what_is_known_is_written() -> None:
    stop = FinishReason.STOP
    segments = (Segment(0, 1, 2), Segment(1, 1, 1, stop), Segment(2, 0, 0, stop, "a|é"))
    text = '[[0,1,2],[1,1,1,"stop"],[2,0,0,"stop","a\\u007cé"]]'
    assert encode_segments(segments) == text


@pytest.mark.parametrize(
    "text", [b"{}", b"[1]", b"[[0,1]]", b'[[0,1,2,"because"]]', b"[[0,1.5,2]]", b"[[0,1,2"]
)
def test_malformed_segments_are_value_errors(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_segments(text)


def test_a_segment_that_ends_within_a_character_is_a_value_error() -> None:
    delta = Delta(START, Cursor(2, 2), (1, 2), "é", None, (Segment(0, 1, 1), Segment(1, 1, 1)))
    with pytest.raises(ValueError, match=r".+"):
        segment_deltas(delta)


def test_the_chain_distinguishes_the_writers_of_a_token() -> None:
    token_ids = (7, 7)
    zeroth = (Segment(0, 2, 0),)
    both = (Segment(0, 1, 0), Segment(1, 1, 0))
    assert chain_links(token_ids, None) == token_ids
    chains = [chain_hash("", chain_links(token_ids, segments)) for segments in (None, zeroth, both)]
    assert chains[0] == chains[1] != chains[2]
    first = chain_hash("", chain_links((7,), both[:1]))
    assert chain_hash(first, chain_links((7,), both[1:])) == chains[2]
