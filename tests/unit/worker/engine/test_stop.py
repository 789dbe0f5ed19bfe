from __future__ import annotations

import pytest

from shared.messages import FinishReason, Grammar, GrammarKind, SamplingParams
from worker.engine.sequence import Sequence
from worker.engine.stop import StopMatch

EOS_IDS = frozenset({8, 9})
STOP = FinishReason.STOP


def stop_of(outputs: list[int], max_model_len: int = 100, **params: object) -> StopMatch | None:
    sampling = SamplingParams(**{"max_tokens": 5, **params})  # type: ignore[arg-type]
    sequence = Sequence(
        seq_id=0,
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        params=sampling,
        max_model_len=max_model_len,
    )
    for token in outputs:
        sequence.append(token)
    return sequence.find_stop(EOS_IDS)


def test_nothing_stops_before_the_first_token() -> None:
    assert stop_of([]) is None


@pytest.mark.promise("Engine: each of several EOS ids stops")
@pytest.mark.parametrize("eos", sorted(EOS_IDS))
def test_each_of_several_eos_ids_stops(eos: int) -> None:
    assert stop_of([1, eos]) == StopMatch(STOP)


def test_only_the_newest_token_is_looked_at() -> None:
    assert stop_of([8, 1]) is None


def test_ignore_eos_runs_on() -> None:
    assert stop_of([8], ignore_eos=True) is None


def test_a_stop_token_id_is_named() -> None:
    assert stop_of([4], stop_token_ids=(4, 5)) == StopMatch(STOP, 4)


def test_eos_goes_before_stop_token_ids_unless_ignored() -> None:
    assert stop_of([8], stop_token_ids=(8,)) == StopMatch(STOP)
    assert stop_of([8], stop_token_ids=(8,), ignore_eos=True) == StopMatch(STOP, 8)


def test_max_tokens_is_length() -> None:
    assert stop_of([1, 1, 1, 1]) is None
    assert stop_of([1, 1, 1, 1, 1]) == StopMatch(FinishReason.LENGTH)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert stop_of([1, 1, 1, 1, 8]) == StopMatch(STOP)
    assert stop_of([1, 1, 1, 1, 4], stop_token_ids=(4,)) == StopMatch(STOP, 4)


def test_max_model_len_is_length() -> None:
    assert stop_of([1], max_model_len=5) is None
    assert stop_of([1, 1], max_model_len=5) == StopMatch(FinishReason.LENGTH)


def test_neither_eos_nor_a_stop_id_ends_before_min_tokens() -> None:
    for token in (8, 4):
        assert stop_of([1, token], min_tokens=3, stop_token_ids=(4,)) is None
        assert stop_of([1, 1, token], min_tokens=3, stop_token_ids=(4,)) is not None


def test_after_a_complete_grammar_eos_ends_the_output() -> None:
    grammar = Grammar(GrammarKind.REGEX, "ab")
    assert stop_of([1, 8], min_tokens=3, grammar=grammar) == StopMatch(STOP)
    assert stop_of([8], ignore_eos=True, stop_token_ids=(8,), grammar=grammar) == StopMatch(STOP)
    assert stop_of([1, 4], min_tokens=3, stop_token_ids=(4,), grammar=grammar) is None


def test_length_ends_even_before_min_tokens() -> None:
    assert stop_of([1, 1], min_tokens=4, max_model_len=5) == StopMatch(FinishReason.LENGTH)
