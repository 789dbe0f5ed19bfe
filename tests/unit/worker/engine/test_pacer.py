"""Prompts are computed beside streams in pieces that hold these up for about as long as agreed."""

from __future__ import annotations

import pytest

from shared.messages import Grammar, GrammarKind
from tests.unit.worker.engine.scripted_runner import (
    ScriptedRunner,
    make_config,
    make_request,
    run_to_end,
)
from worker.engine.batch import ScheduledBatch
from worker.engine.engine import Engine
from worker.engine.pacer import ChunkPacer

DECODE_S = 0.01
TOKEN_S = 0.001


class Machine:
    """A clock that each step moves by what its tokens take."""

    def __init__(self, runner: ScriptedRunner, token_s: float = TOKEN_S) -> None:
        self.runner = runner
        self.token_s = token_s

    def __call__(self) -> float:
        """Seconds until now: of all the steps that were launched."""
        return sum(self.seconds(step.counts.values()) for step in self.runner.steps)

    def seconds(self, counts: object) -> float:
        counts = list(counts)  # type: ignore[call-overload]
        prompt = sum(count for count in counts if count > 1)
        return DECODE_S * (1 in counts) + self.token_s * prompt


def prefills_beside_a_stream(target_s: float | None, token_s: float = TOKEN_S) -> list[int]:
    """Tokens of each step's part of a prompt of 1500, computed while another request streams."""
    runner = ScriptedRunner()
    config = make_config(
        num_blocks=600, max_num_batched_tokens=512, max_model_len=2000, step_target_s=target_s
    )
    engine = Engine(config, runner, clock=Machine(runner, token_s))
    engine.add(make_request("stream", range(900, 964), max_tokens=150))
    for _ in range(5):
        engine.step()
    engine.add(make_request("long", [i % 800 for i in range(1500)], max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    return [step.counts[1] for step in runner.steps if step.counts.get(1, 0) > 1]


def test_without_a_target_a_prompt_takes_the_budget() -> None:
    assert prefills_beside_a_stream(None)[:2] == [511, 511]


def test_steps_keep_to_the_target() -> None:
    chunks = prefills_beside_a_stream(0.1)
    assert sum(chunks) == 1500
    fitting = round((0.1 - DECODE_S) / TOKEN_S)
    assert all(abs(chunk - fitting) <= 1 for chunk in chunks[:-1])


def test_a_generous_target_leaves_the_budget_the_limit() -> None:
    assert prefills_beside_a_stream(60.0)[:2] == [511, 511]


def test_a_prompt_gets_on_even_where_nothing_fits() -> None:
    chunks = prefills_beside_a_stream(0.001, token_s=0.1)
    assert sum(chunks) == 1500
    assert set(chunks[:-1]) == {16}


def test_each_stream_lets_a_few_tokens_of_a_prompt_through() -> None:
    pacer = ChunkPacer(0.1, 512)
    pacer.took(0, 100, 0.1)
    pacer.took(30, 0, 0.2)  # more than the target by themselves
    assert pacer.tokens(30) == 240
    assert pacer.tokens(200) == 512


def test_it_follows_tokens_that_become_slower() -> None:
    pacer = ChunkPacer(0.2, 512)
    pacer.took(0, 100, 0.1)
    assert pacer.tokens(1) == 200
    for _ in range(8):
        pacer.took(1, pacer.tokens(1), pacer.tokens(1) * 0.002)
    assert 95 <= pacer.tokens(1) <= 105


def test_before_anything_is_known_a_step_is_small() -> None:
    assert ChunkPacer(0.2, 512).tokens(1) == 16
    assert ChunkPacer(0.2, 8).tokens(1) == 8


def test_the_end_of_a_prompt_teaches_nothing() -> None:
    pacer = ChunkPacer(0.2, 512)
    pacer.took(0, 100, 0.1)
    pacer.took(1, 2, 0.1)
    assert pacer.tokens(1) == 200


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    runner = ScriptedRunner()
    config = make_config(
        num_blocks=600, max_num_batched_tokens=512, max_model_len=2000, step_target_s=0.001
    )
    engine = Engine(config, runner, clock=Machine(runner))
    engine.add(make_request("alone", [i % 800 for i in range(1200)], max_tokens=1))
    while engine.has_unfinished():
        engine.step()
    assert [step.counts[0] for step in runner.steps] == [512, 512, 176]


def test_targets_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        make_config(step_target_s=0.0)


def device_s(batch: ScheduledBatch) -> float:
    """What a device says of a step: decodes take the same whatever their number, tokens add up."""
    return DECODE_S + TOKEN_S * (batch.num_tokens - batch.num_decodes)


def beside_streams(lookahead: int, target_s: float | None) -> tuple[Engine, ScriptedRunner]:
    """Returns an engine with streams and a long prompt, whose clock stands still."""
    runner = ScriptedRunner(device_s=device_s)
    config = make_config(
        num_blocks=2400,
        max_num_batched_tokens=512,
        max_model_len=8000,
        step_target_s=target_s,
        lookahead=lookahead,
        structured_output=True,
    )
    engine = Engine(config, runner, clock=lambda: 7.0)
    engine.add(make_request("stream", range(900, 964), max_tokens=120))
    grammar = Grammar(GrammarKind.REGEX, "a+")
    engine.add(make_request("kept", range(700, 720), max_tokens=120, grammar=grammar))
    for _ in range(5):
        engine.step()
    engine.add(make_request("long", [i % 800 for i in range(4000)], max_tokens=2))
    return engine, runner


def chunks_of(runner: ScriptedRunner) -> list[int]:
    return [step.counts[2] for step in runner.steps if step.counts.get(2, 0) > 1]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_by_a_devices_own_time_steps_keep_to_the_target(lookahead: int) -> None:
    engine, runner = beside_streams(lookahead, 0.1)
    run_to_end(engine)
    chunks = chunks_of(runner)
    assert sum(chunks) == 4000
    fitting = round((0.1 - DECODE_S) / TOKEN_S)
    assert all(abs(chunk - fitting) <= 2 for chunk in chunks[5:-1]), chunks


@pytest.mark.parametrize("lookahead", [0, 1])
def test_each_step_teaches_its_own_time(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[tuple[int, int, float]] = []
    monkeypatch.setattr(ChunkPacer, "took", lambda self, *step: taught.append(step))
    engine, runner = beside_streams(lookahead, 0.1)
    run_to_end(engine)
    contents = [(s.num_decodes, sum(s.counts.values()) - s.num_decodes) for s in runner.steps]
    assert taught == [
        (decodes, tokens, DECODE_S + TOKEN_S * tokens) for decodes, tokens in contents
    ]
    assert any(decodes and tokens for decodes, tokens in contents)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_outputs_are_the_same_with_and_without_a_target(lookahead: int) -> None:
    paced, runner = beside_streams(lookahead, 0.1)
    free, other = beside_streams(lookahead, None)
    said = [
        {name: (story.token_ids, story.last.finish_reason) for name, story in stories.items()}
        for stories in (run_to_end(paced), run_to_end(free))
    ]
    assert said[0] == said[1]
    assert max(chunks_of(runner)) < max(chunks_of(other)) == 510
