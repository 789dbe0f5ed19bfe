"""ReaderPosition, for jobs of several choices: what comes twice is trimmed choice by choice."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.reader_position import Diverged, ReaderPosition
from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import START, Cursor, Delta, FinishReason, Segment, TokenLogprob

STOP = FinishReason.STOP
Unit = list[ChoiceDelta]  # what is never divided: perhaps ends without tokens, then a token


@st.composite
def histories(draw: st.DrawFn) -> list[Unit]:
    """A whole job of three choices, each of which ends once, with a token or without."""
    lives: dict[int, int] = {choice: draw(st.integers(1, 4)) for choice in range(3)}
    units: list[Unit] = []
    unit: Unit = []
    token_ids = itertools.count()
    while lives:
        choice = draw(st.sampled_from(sorted(lives)))
        lives[choice] -= 1
        is_last = lives[choice] == 0
        if is_last:
            del lives[choice]
        if is_last and lives and draw(st.booleans()):
            unit.append(ChoiceDelta(choice, (), "", (), STOP))
            continue
        text = draw(st.sampled_from(("", "a", "é", "😀b")))
        token_id = next(token_ids) if draw(st.booleans()) else 7
        reason = STOP if is_last else None
        unit.append(ChoiceDelta(choice, (token_id,), text, (TokenLogprob(token_id, -1.0),), reason))
        units.append(unit)
        unit = []
    return units


def deltas_of(units: Sequence[Unit], sizes: Sequence[int]) -> list[Delta]:
    """The log in which the appends had so many units, and one from there on."""
    deltas, cursor, rest = [], START, list(units)
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if not rest:
            break
        pieces = [piece for unit in rest[:size] for piece in unit]
        del rest[:size]
        token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
        text = "".join(piece.text for piece in pieces)
        end = Cursor(cursor.num_tokens + len(token_ids), cursor.num_bytes + len(text.encode()))
        segments = tuple(
            Segment(p.choice, len(p.token_ids), len(p.text.encode()), p.finish_reason)
            for p in pieces
        )
        logprobs = tuple(TokenLogprob(token_id, -1.0) for token_id in token_ids)
        deltas.append(Delta(cursor, end, token_ids, text, logprobs, segments))
        cursor = end
    return deltas


def result(parts: Sequence[ChoiceDelta]) -> dict[int, tuple[str, tuple[int, ...], int]]:
    """Text, tokens and number of ends of each choice."""
    found: dict[int, list[ChoiceDelta]] = defaultdict(list)
    for part in parts:
        assert [entry.token_id for entry in part.logprobs or ()] == list(part.token_ids)
        found[part.choice].append(part)
    return {
        choice: (
            "".join(part.text for part in own),
            tuple(token_id for part in own for token_id in part.token_ids),
            sum(part.finish_reason is not None for part in own),
        )
        for choice, own in found.items()
    }


sizes = st.lists(st.integers(1, 4), max_size=8)


@given(histories(), sizes, sizes, st.data())
def test_a_rewritten_log_is_sent_once_choice_by_choice(
    units: list[Unit], sizes_before: list[int], sizes_after: list[int], data: st.DataObject
) -> None:
    before, after = deltas_of(units, sizes_before), deltas_of(units, sizes_after)
    num_had = data.draw(st.integers(0, len(before)))
    reader = ReaderPosition(START)
    got: list[ChoiceDelta] = []
    for delta in (*before[:num_had], *after):
        assert not reader.is_gap(delta)
        fresh = reader.take(delta)
        if fresh is not None:
            got += segment_deltas(fresh)
    assert reader.cursor == before[-1].end
    assert result(got) == result([piece for unit in units for piece in unit])


@given(histories(), sizes, st.data())
def test_a_reader_may_come_back_to_any_segment(
    units: list[Unit], sizes: list[int], data: st.DataObject
) -> None:
    """As one does whose connection broke between two events of one delta."""
    log = deltas_of(units, sizes)
    pieces = [piece for unit in units for piece in unit if piece.token_ids]
    num_had = data.draw(st.integers(0, len(pieces) - 1))
    num_bytes = len("".join(piece.text for piece in pieces[:num_had]).encode())
    reader = ReaderPosition(Cursor(num_had, num_bytes))
    got: list[ChoiceDelta] = []
    for delta in log:
        if delta.end > reader.cursor:
            fresh = reader.take(delta)
            assert fresh is not None
            got += [part for part in segment_deltas(fresh) if part.token_ids]
    assert result(got) == result(pieces[num_had:])


def one(choice: int, token_id: int = 7, start: Cursor = START) -> Delta:
    end = Cursor(start.num_tokens + 1, start.num_bytes + 1)
    return Delta(start, end, (token_id,), "a", None, (Segment(choice, 1, 1),))


def test_the_same_tokens_of_another_choice_are_another_history() -> None:
    reader = ReaderPosition(START)
    reader.take(one(0))
    longer = Delta(START, Cursor(2, 2), (7, 7), "aa", None, (Segment(1, 1, 1), Segment(0, 1, 1)))
    with pytest.raises(Diverged):
        reader.take(longer)


def test_what_needs_no_trimming_is_handed_on_as_it_is() -> None:
    reader = ReaderPosition(START)
    first = one(0)
    second = one(1, start=first.end)
    assert reader.take(first) is first
    assert reader.take(second) is second


def test_an_end_that_was_delivered_does_not_come_again() -> None:
    reader = ReaderPosition(START)
    first = Delta(START, Cursor(1, 1), (7,), "a", None, (Segment(0, 1, 1), Segment(1, 0, 0, STOP)))
    reader.take(first)
    again = Delta(
        first.end, Cursor(2, 2), (8,), "b", None, (Segment(1, 0, 0, STOP), Segment(0, 1, 1))
    )
    fresh = reader.take(again)
    assert fresh is not None
    assert fresh.segments == (Segment(0, 1, 1),)
