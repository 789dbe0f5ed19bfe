"""Deltas in, fewer deltas out: nothing lost, each choice's first token at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.batched_deltas import BatchedDeltas
from api.jobs.sent_events import MANY_CHARS
from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import Cursor, Delta, FinishReason, Segment, TokenLogprob

STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=60)


def delta_of(choice: int, first: int, num_tokens: int, *, ends: bool = False) -> Delta:
    ids = tuple(range(first, first + num_tokens))
    text = "".join(chr(0xE0 + i % 20) for i in ids)
    reason = FinishReason.STOP if ends else None
    return Delta(
        Cursor(0, 0),
        Cursor(num_tokens, len(text.encode())),
        ids,
        text,
        tuple(TokenLogprob(i, -1.0) for i in ids),
        (Segment(choice, num_tokens, len(text.encode()), reason),),
    )


def parts_of(deltas: Sequence[Delta]) -> dict[int, list[ChoiceDelta]]:
    parts: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        for part in segment_deltas(delta):
            parts.setdefault(part.choice, []).append(part)
    return parts


@given(STEPS, st.integers(1, 9))
def test_every_choice_keeps_its_tokens_in_their_order(
    steps: list[tuple[int, int]], interval: int
) -> None:
    given_, made, first = BatchedDeltas(interval), [], 0
    result: list[Delta] = []
    for choice, num_tokens in steps:
        made.append(delta_of(choice, first, num_tokens))
        result += given_.push([made[-1]])
        first += num_tokens
    result += given_.rest()
    assert list(given_.rest()) == []
    before, after = parts_of(made), parts_of(result)
    assert before.keys() == after.keys()
    for choice, parts in after.items():
        wanted = before[choice]
        assert sum((p.token_ids for p in parts), ()) == sum((p.token_ids for p in wanted), ())
        assert "".join(p.text for p in parts) == "".join(p.text for p in wanted)
        assert sum((p.logprobs or () for p in parts), ()) == sum(
            (p.logprobs or () for p in wanted), ()
        )
        assert parts[0].token_ids == wanted[0].token_ids, "its first at once"
        assert all(len(part.token_ids) >= interval for part in parts[1:-1])


@pytest.mark.promise(
    "Runtime: a stream interval for each request (the first token of a choice comes at once, so "
    "100 tokens in eights are 14 events)"
)
def test_a_hundred_tokens_in_eights() -> None:
    gathered = BatchedDeltas(8)
    result = [d for i in range(100) for d in gathered.push([delta_of(0, i, 1)])]
    result += gathered.rest()
    assert [len(delta.token_ids) for delta in result] == [1, *[8] * 12, 3]


def test_no_more_is_joined_than_a_parser_reads_in_one_go() -> None:
    """The tokens of some vocabularies have a hundred characters each."""
    gathered, text = BatchedDeltas(4096), " " * 128
    one = Delta(Cursor(0, 0), Cursor(1, len(text)), (7,), text, None)
    result = [delta for _ in range(4096) for delta in gathered.push([one])]
    result += gathered.rest()
    assert sum(len(delta.token_ids) for delta in result) == 4096
    assert all(len(delta.text) == MANY_CHARS for delta in result[1:-1])


def test_the_end_of_a_choice_comes_with_its_last_tokens() -> None:
    gathered = BatchedDeltas(50)
    assert len(list(gathered.push([delta_of(1, 0, 1)]))) == 1
    assert not list(gathered.push([delta_of(1, 1, 3)]))
    (last,) = gathered.push([delta_of(1, 4, 1, ends=True)])
    (part,) = segment_deltas(last)
    assert (part.token_ids, part.finish_reason) == ((1, 2, 3, 4), FinishReason.STOP)
    assert not list(gathered.rest())


def test_tokens_without_text_do_not_count_as_the_first() -> None:
    gathered = BatchedDeltas(8)
    silent = Delta(Cursor(0, 0), Cursor(1, 0), (7,), "")
    assert [delta.text for delta in gathered.push([silent, silent])] == ["", ""]
    assert len(list(gathered.push([delta_of(0, 0, 1)]))) == 1
    assert not list(gathered.push([delta_of(0, 1, 1)]))
