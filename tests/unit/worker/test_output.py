from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import (
    START,
    Cursor,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    TokenLogprob,
)
from tests.unit.worker.fakes import EOS, ByteTokenizer
from worker.engine.stop import find_stop
from worker.output import OutputChunk, OutputProcessor, ReplayMismatch

TOKENIZER = ByteTokenizer()
KEPT = {"grammar": Grammar(GrammarKind.REGEX, "a*")}


def processor(**sampling: object) -> OutputProcessor:
    params = SamplingParams(**({"max_tokens": 1000, "seed": 1} | sampling))  # type: ignore[arg-type]
    return OutputProcessor(TOKENIZER, params)


def run(
    out: OutputProcessor, token_ids: list[int], finish: FinishReason
) -> tuple[str, list[OutputChunk]]:
    """Token by token; the finish comes with the last one unless a stop string is first."""
    pieces = []
    for index, token_id in enumerate(token_ids):
        last = index == len(token_ids) - 1
        pieces.append(out.push((token_id,), None, finish if last else None))
        if pieces[-1].finish_reason is not None:
            break
    return "".join(piece.text for piece in pieces), pieces


tokens = st.lists(st.integers(0, 255), min_size=1, max_size=60)
texts = st.text(alphabet="abX é😀", min_size=1, max_size=60)
stops = st.lists(st.text(alphabet="abX é😀", min_size=1, max_size=4), max_size=4).map(tuple)


@given(tokens)
def test_streamed_text_equals_the_text_decoded_at_once_for_any_bytes(token_ids: list[int]) -> None:
    text, pieces = run(processor(), token_ids, FinishReason.LENGTH)
    assert text == TOKENIZER.decode(token_ids)
    assert pieces[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.promise("Runtime: text is well-formed UTF-8 for any tokens")
@given(tokens, stops)
def test_every_piece_is_well_formed_utf8(token_ids: list[int], stop: tuple[str, ...]) -> None:
    _, pieces = run(processor(stop=stop), token_ids, FinishReason.LENGTH)
    for piece in pieces:
        piece.text.encode()


@given(texts, stops)
def test_text_is_cut_before_the_stop_string_that_completes_first(
    text: str, stop: tuple[str, ...]
) -> None:
    token_ids = TOKENIZER.encode(text)
    streamed, pieces = run(processor(stop=stop), token_ids, FinishReason.LENGTH)
    ends = {s: text.find(s) + len(s) for s in stop if s in text}
    if not ends:
        assert streamed == text
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        return
    first = min(ends.values())
    matched = max((s for s, end in ends.items() if end == first), key=len)
    assert streamed == text[: first - len(matched)]
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert pieces[-1].stop_reason == matched
    used = sum(len(piece.token_ids) for piece in pieces)
    assert used == len(text[:first].encode())


@given(texts, stops, st.integers(0, 60), st.integers(0, 5))
def test_a_resumed_job_has_the_same_text_as_an_uninterrupted_one(
    text: str, stop: tuple[str, ...], cut: int, min_tokens: int
) -> None:
    token_ids = TOKENIZER.encode(text)
    whole, whole_pieces = run(
        processor(stop=stop, min_tokens=min_tokens), token_ids, FinishReason.LENGTH
    )
    before = processor(stop=stop, min_tokens=min_tokens)
    head = whole_pieces[: min(cut, len(whole_pieces) - 1)]
    reply = "".join(before.push(p.token_ids).text for p in head)
    logged = [t for p in head for t in p.token_ids]
    after = processor(stop=stop, min_tokens=min_tokens)
    replayed = after.replay(logged, Cursor(len(logged), len(reply.encode())))
    assert replayed == OutputChunk((), "")
    rest, rest_pieces = run(after, token_ids[len(logged) :], FinishReason.LENGTH)
    assert reply + rest == whole
    assert rest_pieces[-1] == whole_pieces[-1]


@pytest.mark.promise("Runtime: an incomplete character waits for its rest")
def test_an_emoji_over_four_tokens_is_one_piece_of_text() -> None:
    out = processor()
    assert [out.push((t,)).text for t in "😀".encode()] == ["", "", "", "😀"]


def test_a_character_cut_off_at_the_end_is_one_replacement_character() -> None:
    text, _ = run(processor(), list("ok😀".encode()[:-1]), FinishReason.LENGTH)
    assert text == "ok\ufffd"


def test_a_stop_strings_beginning_is_held_back_and_released_when_it_goes_on_otherwise() -> None:
    out = processor(stop=("END",))
    assert [out.push((t,)).text for t in b"aEN"] == ["a", "", ""]
    assert out.push((ord("X"),)).text == "ENX"


def test_held_back_text_is_released_at_a_natural_end() -> None:
    text, _ = run(processor(stop=("END",)), list(b"aEN"), FinishReason.LENGTH)
    assert text == "aEN"


def test_a_stop_string_that_only_the_flush_completes_still_stops() -> None:
    text, pieces = run(processor(stop=("\ufffd",)), [65, 0xF0], FinishReason.LENGTH)
    assert text == "A"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (FinishReason.STOP, "\ufffd")


def test_eos_and_stop_tokens_are_counted_and_not_shown() -> None:
    out = processor()
    assert out.push((65, EOS), None, FinishReason.STOP) == OutputChunk(
        (65, EOS), "A", None, FinishReason.STOP, None
    )
    out = processor(stop_token_ids=(66,))
    piece = out.push((65, 66), None, FinishReason.STOP, 66)
    assert (piece.token_ids, piece.text, piece.stop_reason) == ((65, 66), "A", 66)


def test_logprobs_are_cut_with_their_tokens() -> None:
    logprobs = tuple(TokenLogprob(t, -1.0) for t in b"aSb")
    piece = processor(stop=("S",)).push(tuple(b"aSb"), logprobs)
    assert piece.token_ids == tuple(b"aS")
    assert piece.logprobs == logprobs[:2]


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    text, pieces = run(processor(stop=("S",), min_tokens=3), list(b"SaSb"), FinishReason.LENGTH)
    assert text == "Sa"
    assert pieces[-1].stop_reason == "S"


def test_abort_gives_what_was_held_back() -> None:
    out = processor(stop=("END",))
    out.push(tuple(b"aEN"))
    assert out.abort() == "EN"


def test_a_log_with_less_text_than_is_due_now_gets_the_rest_with_the_next_piece() -> None:
    out = processor()
    out.replay(list(b"abc"), Cursor(3, 1))
    assert out.push((100,)).text == "bcd"


@pytest.mark.parametrize(
    ("token_ids", "logged"),
    [
        (list(b"abc"), Cursor(3, 4)),  # more text than the tokens give
        (list(b"abc"), Cursor(2, 2)),  # another number of tokens
        (list("é".encode()), Cursor(2, 1)),  # within a character
    ],
)
def test_a_log_that_another_tokenizer_wrote_is_refused(
    token_ids: list[int], logged: Cursor
) -> None:
    with pytest.raises(ReplayMismatch):
        processor().replay(token_ids, logged)


def test_a_history_that_completed_a_stop_string_ends_at_once() -> None:
    piece = processor(stop=("END",)).replay(list(b"aEND"), Cursor(4, 1))
    assert piece == OutputChunk((), "", None, FinishReason.STOP, "END")


def test_a_history_that_ended_by_token_does_not_show_it() -> None:
    out = processor()
    out.replay([*b"ab", 67], Cursor(3, 2), ends_by_token=True)
    assert out.abort() == ""


@pytest.mark.parametrize(
    ("token_ids", "sampling", "expected"),
    [
        ([], {}, None),
        ([1, 2], {}, None),
        ([1, EOS], {}, (FinishReason.STOP, None)),
        ([1, EOS], {"ignore_eos": True}, None),
        ([1, EOS], {"min_tokens": 3}, None),
        ([1, EOS], {"min_tokens": 3, "ignore_eos": True, **KEPT}, (FinishReason.STOP, None)),
        ([1, 9], {"stop_token_ids": (9,)}, (FinishReason.STOP, 9)),
        ([1, 9], {"stop_token_ids": (9,), "min_tokens": 3, **KEPT}, None),
        ([1, 2, 3], {"max_tokens": 3}, (FinishReason.LENGTH, None)),
    ],
)
def test_an_end_that_the_log_already_holds_is_seen(
    token_ids: list[int], sampling: dict[str, object], expected: object
) -> None:
    params = SamplingParams(**({"max_tokens": 10, "seed": 1} | sampling))  # type: ignore[arg-type]
    assert find_stop(token_ids, params, frozenset({EOS}), params.max_tokens) == expected


def test_an_empty_history_is_the_beginning() -> None:
    assert processor().replay([], START) == OutputChunk((), "")
