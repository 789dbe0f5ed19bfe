from __future__ import annotations

from itertools import pairwise

import pytest

from api.jobs.sent_events import FEW_EVENTS, plain_pieces, split_by_segment, split_by_step
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


@pytest.mark.parametrize("num_waiting", [0, FEW_EVENTS + 1])
@pytest.mark.parametrize("text", ["aé€", "abcdef", "€é!"])
def test_plain_pieces_are_what_a_split_by_step_gives(text: str, num_waiting: int) -> None:
    segments = tuple(Segment(0, 1, len(character.encode())) for character in text)
    num_bytes = len(text.encode())
    token_ids = tuple(range(len(text)))
    delta = Delta(
        Cursor(5, 7), Cursor(5 + len(text), 7 + num_bytes), token_ids, text, None, segments
    )
    for one in (delta, delta._replace(segments=None)):
        assert list(plain_pieces(one, num_waiting)) == [
            (piece.token_ids, piece.text) for piece in split_by_step(one, num_waiting)
        ]


@pytest.mark.parametrize(
    "delta",
    [
        Delta(Cursor(0, 0), Cursor(1, 0), (1,), ""),
        Delta(Cursor(0, 0), Cursor(2, 1), (1, 2), "a", None, (Segment(0, 1, 1), Segment(0, 1, 0))),
        Delta(Cursor(0, 0), Cursor(2, 2), (1, 2), "ab", None, (Segment(0, 1, 1), Segment(1, 1, 1))),
        Delta(Cursor(0, 0), Cursor(1, 1), (1,), "a", None, (Segment(0, 1, 1, FinishReason.STOP),)),
        Delta(Cursor(0, 0), Cursor(129, 129), (1,) * 129, "a" * 129),
    ],
)
def test_a_delta_that_is_more_than_plain_text_has_no_plain_pieces(delta: Delta) -> None:
    assert plain_pieces(delta, 0) == ()
