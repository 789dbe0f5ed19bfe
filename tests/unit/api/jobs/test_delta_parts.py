from __future__ import annotations

from itertools import pairwise

import pytest

from api.jobs.delta_parts import FEW_EVENTS, split_by_segment, split_by_step
from shared.messages import Cursor, Delta, FinishReason, Segment, TokenLogprob

PIECES = Delta(
    Cursor(5, 7),
    Cursor(9, 13),
    (1, 2, 3, 4),
    "aé€",
    tuple(TokenLogprob(token_id, -0.5) for token_id in (1, 2, 3, 4)),
    (Segment(0, 1, 1), Segment(0, 2, 2), Segment(0, 1, 3)),
)


def test_each_piece_is_a_delta_that_goes_on_where_the_last_one_ended() -> None:
    pieces = split_by_segment(PIECES)
    assert [piece.text for piece in pieces] == ["a", "é", "€"]
    assert [piece.token_ids for piece in pieces] == [(1,), (2, 3), (4,)]
    assert [piece.end for piece in pieces] == [Cursor(6, 8), Cursor(8, 10), Cursor(9, 13)]
    assert pieces[0].start == PIECES.start
    assert all(before.end == after.start for before, after in pairwise(pieces))
    assert [entry for piece in pieces for entry in piece.logprobs or ()] == list(
        PIECES.logprobs or ()
    )
    assert [piece.segments for piece in pieces] == [None, None, None]


def test_split_by_segment_several_choices_say_whose_they_are() -> None:
    last = Segment(0, 1, 1, FinishReason.STOP, "x")
    delta = Delta(Cursor(0, 0), Cursor(2, 2), (1, 2), "ab", None, (Segment(1, 1, 1), last))
    assert [piece.segments for piece in split_by_segment(delta)] == [(Segment(1, 1, 1),), (last,)]


def test_a_segment_that_ends_within_a_character_is_refused() -> None:
    halves = (Segment(0, 1, 1), Segment(0, 1, 1))
    with pytest.raises(ValueError, match="utf-8"):
        split_by_segment(Delta(Cursor(0, 0), Cursor(2, 2), (1, 2), "é", None, halves))


def test_a_reader_that_lags_gets_whole_deltas() -> None:
    assert len(split_by_step(PIECES, FEW_EVENTS)) == 3
    assert split_by_step(PIECES, FEW_EVENTS + 1) == (PIECES,)
