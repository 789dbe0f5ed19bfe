from __future__ import annotations

import pytest

from shared.messages import FinishReason
from tests.unit.worker.engine.scripted_runner import make_config, make_request, run_to_end
from worker.engine.engine import Engine
from worker.engines.echo import EchoModelRunner

PROMPT = (11, 12, 13)


def echo(
    *, lookahead: int = 0, eos_token_id: int | None = None, **request: object
) -> tuple[list[int], FinishReason | None]:
    eos_token_ids = frozenset(() if eos_token_id is None else (eos_token_id,))
    engine = Engine(
        make_config(lookahead=lookahead, eos_token_ids=eos_token_ids),
        EchoModelRunner(100, eos_token_id=eos_token_id),
    )
    engine.add(make_request(prompt=PROMPT, **request))  # type: ignore[arg-type]
    story = run_to_end(engine)["a"]
    return story.token_ids, story.last.finish_reason


@pytest.mark.parametrize("lookahead", [0, 1])
def test_it_repeats_the_prompt(lookahead: int) -> None:
    expected = [11, 12, 13, 11, 12, 13, 11], FinishReason.LENGTH
    assert echo(lookahead=lookahead, max_tokens=7) == expected


def test_a_resumed_echo_goes_on_where_it_was() -> None:
    assert echo(outputs=(11, 12), max_tokens=6)[0] == [13, 11, 12, 13]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_with_an_eos_it_ends_after_one_whole_echo(lookahead: int) -> None:
    expected = [11, 12, 13, 9], FinishReason.STOP
    assert echo(lookahead=lookahead, eos_token_id=9, max_tokens=20) == expected


def test_it_keeps_its_eos_back_until_min_tokens() -> None:
    assert echo(eos_token_id=9, min_tokens=5, max_tokens=20)[0] == [11, 12, 13, 11, 12, 9]


def test_its_choice_is_certain() -> None:
    engine = Engine(make_config(), EchoModelRunner(100))
    engine.add(make_request(prompt=PROMPT, max_tokens=1, logprobs=3))
    logprobs = run_to_end(engine)["a"].last.logprobs
    assert logprobs is not None
    assert (logprobs[0].token_id, logprobs[0].logprob) == (11, 0.0)
    assert [token for token, _ in logprobs[0].top] == [11, 0, 1]


@pytest.mark.parametrize(("vocab_size", "eos_token_id"), [(0, None), (5, 5), (5, -1)])
def test_an_impossible_vocabulary_is_refused(vocab_size: int, eos_token_id: int | None) -> None:
    with pytest.raises(ValueError, match="vocab"):
        EchoModelRunner(vocab_size, eos_token_id=eos_token_id)
