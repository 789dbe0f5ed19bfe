from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.detokenizer import StopStringMatcher
from tests.support.examples import examples

STOPS = st.lists(st.text("ab🎉", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def search(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the first stop string to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_by_definition(text: str, stops: tuple[str, ...]) -> int:
    """The longest end of the text that begins a stop string."""
    starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max((size for size in range(1, len(text) + 1) if text[-size:] in starts), default=0)


@settings(max_examples=examples(150))
@given(text=st.text("ab🎉", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_every_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    matcher = StopStringMatcher(stops)
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    released, matched = "", None
    for start, end in itertools.pairwise(edges):
        part, matched = matcher.push(text[start:end])
        released += part
        if matched is not None:
            break
        assert text[:end] == released + matcher.held
        assert len(matcher.held) == held_by_definition(text[:end], stops)
    released += matcher.flush()
    assert (released, matched) == search(text, stops)


def test_the_start_of_a_stop_string_never_leaks_and_is_released_when_it_was_none() -> None:
    matcher = StopStringMatcher(("END",))
    assert [matcher.push("a EN"), matcher.push("D b")] == [("a ", None), ("", "END")]
    matcher = StopStringMatcher(("END",))
    assert [matcher.push("a EN"), matcher.push("X")] == [("a ", None), ("ENX", None)]


def test_text_that_can_start_no_stop_string_is_released_at_once() -> None:
    matcher = StopStringMatcher(("</answer>", "\n\n"))
    assert matcher.push("a long piece of text") == ("a long piece of text", None)
    assert matcher.push(" <") == (" ", None)
    assert matcher.push("b") == ("<b", None)


def test_flush_releases_what_was_held() -> None:
    matcher = StopStringMatcher(("END",))
    assert matcher.push("xEN") == ("x", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_after_a_match_nothing_is_released() -> None:
    matcher = StopStringMatcher(("b",))
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("more") == ("", "b")
    assert matcher.flush() == ""


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert StopStringMatcher(("abcd", "bc")).push("xabcd") == ("xa", "bc")
    assert StopStringMatcher(("c", "abc")).push("xabcd") == ("x", "abc")


def test_a_failed_start_falls_back_to_a_later_one() -> None:
    matcher = StopStringMatcher(("aab",))
    assert [matcher.push(c) for c in "aaab"] == [("", None), ("", None), ("a", None), ("", "aab")]


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopStringMatcher(())
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="not empty"):
        StopStringMatcher(("",))


def test_what_is_held_is_shorter_than_the_longest_stop_string() -> None:
    matcher = StopStringMatcher(("a" * 512 + "b",))
    released = 0
    for _ in range(200):
        part, matched = matcher.push("a" * 50)
        released += len(part)
        assert matched is None
        assert len(matcher.held) <= 512
    assert released + len(matcher.held) == 10_000
