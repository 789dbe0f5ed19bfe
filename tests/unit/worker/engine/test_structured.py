"""Sequences with a grammar are sampled when their tokens are known, and cost no step."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind
from tests.unit.worker.engine.scripted_runner import (
    EOS,
    ScriptedRunner,
    Story,
    counting,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.batch import ScheduledSequence
from worker.engine.engine import Engine
from worker.engine.errors import DeviceLost, OutOfMemory
from worker.engine.request import EngineRequest

LETTERS = Grammar(GrammarKind.REGEX, "a+")


def engine_over(runner: ScriptedRunner, lookahead: int = 1, **config: object) -> Engine:
    return make_engine(runner, lookahead=lookahead, structured_output=True, **config)


def kept(
    request_id: str = "kept", prompt: Iterable[int] = (1, 2, 3), **params: object
) -> EngineRequest:
    return make_request(request_id, prompt, grammar=LETTERS, **params)


def say(count: int, first: int = 0) -> list[int]:
    return [100 + i for i in range(first, first + count)]


def steps_of(engine: Engine) -> int:
    """Runs to the end; returns the calls of `step`."""
    count = 0
    while engine.has_unfinished():
        engine.step()
        count += 1
    return count


@pytest.mark.promise("Grammars: with lookahead a grammar costs no step (64 tokens are 64 steps)")
@pytest.mark.parametrize(("lookahead", "most"), [(0, 64), (1, 65)])
def test_it_costs_no_step(lookahead: int, most: int) -> None:
    runner = ScriptedRunner()
    engine = engine_over(runner, lookahead)
    engine.add(kept(max_tokens=64))
    assert steps_of(engine) == most
    assert len(runner.steps) == 64


def test_it_is_sampled_beside_others_when_its_tokens_are_known_and_before_the_next_launch() -> None:
    runner = ScriptedRunner()
    engine = engine_over(runner)
    engine.add(make_request("free", max_tokens=6))
    engine.add(kept(max_tokens=3))
    stories = run_to_end(engine)
    assert stories["free"].token_ids == say(6)
    assert stories["kept"].token_ids == say(3)
    assert [step.order for step in runner.steps] == [[0, 1]] * 3 + [[0]] * 3
    assert [(call.step, call.num_launched) for call in runner.sampled] == [(0, 1), (1, 2), (2, 3)]
    assert [call.num_outputs for call in runner.sampled] == [{1: 0}, {1: 1}, {1: 2}]


def test_without_one_nothing_is_sampled_apart() -> None:
    runner = ScriptedRunner()
    engine = engine_over(runner)
    engine.add(make_request("free", max_tokens=6))
    run_to_end(engine)
    assert runner.sampled == []


def until_eos(item: ScheduledSequence) -> int:
    return EOS if item.seq_id == 0 and item.output_index == 2 else counting(item)


def test_one_that_has_ended_is_not_sampled_any_more() -> None:
    """Its end is seen after the step behind it was launched."""
    runner = ScriptedRunner(until_eos)
    engine = engine_over(runner)
    engine.add(kept("a", max_tokens=30))
    engine.add(kept("b", max_tokens=30))
    stories: dict[str, Story] = {}
    for _ in range(4):
        tell(stories, engine.step())
    assert stories["a"].last.finish_reason is FinishReason.STOP
    assert engine.cancel("b")
    assert not run_to_end(engine, stories=stories)["b"].last.finish_reason
    assert [step.order for step in runner.steps] == [[0, 1]] * 4
    assert [list(call.num_outputs) for call in runner.sampled] == [[0, 1]] * 3 + [[]]


def test_one_that_cannot_be_followed_ends_alone() -> None:
    runner = ScriptedRunner(failures={2: {0: "grammar_failed: no text: fits"}})
    engine = engine_over(runner)
    engine.add(kept(max_tokens=5))
    engine.add(make_request("free", max_tokens=5))
    stories = run_to_end(engine)
    assert stories["kept"].last.error is ErrorCode.GRAMMAR_FAILED
    assert stories["kept"].token_ids == say(2)
    assert stories["free"].token_ids == say(5)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("sampler"), OutOfMemory("sampler")], ids=repr)
def test_a_step_that_fails_while_sampling_is_computed_again(
    lookahead: int, error: Exception
) -> None:
    runner = ScriptedRunner(sample_errors={2: error})
    engine = engine_over(runner, lookahead)
    engine.add(kept("a", max_tokens=5))
    engine.add(kept("b", max_tokens=5))
    engine.add(make_request("free", max_tokens=5))
    stories = run_to_end(engine)
    assert {name: story.token_ids for name, story in stories.items()} == dict.fromkeys(
        ("a", "b", "free"), say(5)
    )
    assert all(len(story.outputs) == 5 for story in stories.values())
    assert 2 not in runner.collected
    assert engine.stats().failed_steps == 1


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_that_always_fails_while_it_is_sampled_ends_and_the_others_go_on(
    lookahead: int,
) -> None:
    runner = ScriptedRunner()
    engine = engine_over(runner, lookahead)
    engine.add(kept("bad", (7, 7), max_tokens=5))
    engine.add(kept("good", max_tokens=5))

    def next_token(item: ScheduledSequence) -> int:
        if item.prompt_token_ids[0] == 7 and item.output_index == 2:
            raise RuntimeError("no mask")
        return counting(item)

    runner.next_token = next_token
    stories = run_to_end(engine)
    assert stories["good"].token_ids == say(5)
    assert stories["bad"].token_ids == say(2)
    assert stories["bad"].last.error is ErrorCode.ENGINE_ERROR


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_device_that_is_lost_while_sampling_ends_the_engine(lookahead: int) -> None:
    engine = engine_over(ScriptedRunner(sample_errors={2: DeviceLost("gone")}), lookahead)
    engine.add(kept(max_tokens=5))
    stories: dict[str, Story] = {}
    for _ in range(2 + lookahead):
        tell(stories, engine.step())
    with pytest.raises(DeviceLost):
        engine.step()
    assert stories["kept"].token_ids == say(2)
    assert stories["kept"].last.finish_reason is None, "another engine goes on with it"


def test_a_step_after_a_failed_one_is_not_sampled() -> None:
    runner = ScriptedRunner(collect_errors={1: RuntimeError("step")})
    engine = engine_over(runner)
    engine.add(kept("a", max_tokens=4))
    engine.add(kept("b", max_tokens=4))
    stories = run_to_end(engine)
    assert stories["a"].token_ids == stories["b"].token_ids == say(4)
    assert runner.collected[:3] == [0, 1, 2]
    assert 2 not in [call.step for call in runner.sampled]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_whose_mask_is_not_ready_sits_steps_out_and_the_others_miss_none(
    lookahead: int,
) -> None:
    mask: Future[None] = Future()
    runner = ScriptedRunner(waits={0: mask})
    engine = engine_over(runner, lookahead)
    engine.add(kept("slow", (1, 2, 3, 4, 5), max_tokens=3))
    engine.add(make_request("plain", (6,), max_tokens=20))
    outputs: dict[str, list[int]] = {"slow": [], "plain": []}

    def step() -> None:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids

    for _ in range(10):
        step()
    assert outputs == {"slow": [], "plain": say(10 - lookahead)}
    assert [step.order for step in runner.steps[1:]] == [[1]] * 9  # it costs the steps nothing
    mask.set_result(None)
    while engine.has_unfinished():
        step()
    assert outputs == {"slow": say(3), "plain": say(20)}
    # Its prompt stays computed but for the token whose logits are wanted.
    assert next((s.starts[0], s.counts[0]) for s in runner.steps[1:] if 0 in s.starts) == (4, 1)
    engine.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_engine_with_only_held_requests_waits_and_continues(lookahead: int) -> None:
    runner = ScriptedRunner(waits={0: Future(), 1: Future()})
    engine = engine_over(runner, lookahead)
    for request_id in ("a", "b"):
        engine.add(kept(request_id, max_tokens=2))
    for _ in range(4):
        assert engine.step() == []
    assert len(runner.steps) == 1
    assert engine.cancel("a")
    runner.waits[1].set_result(None)
    story = run_to_end(engine)
    assert story["b"].token_ids == say(2)
    engine.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_that_fails_with_one_put_off_is_computed_again(lookahead: int) -> None:
    mask: Future[None] = Future()
    runner = ScriptedRunner(waits={0: mask}, collect_errors={1: OutOfMemory("step 1")})
    runner.collect_errors[0] = OutOfMemory("step 0")
    engine = engine_over(runner, lookahead)
    engine.add(kept("slow", max_tokens=2))
    engine.add(make_request("plain", (6,), max_tokens=4))
    story = [engine.step() for _ in range(3)]
    assert not any(output.request_id == "slow" for outputs in story for output in outputs)
    mask.set_result(None)
    assert run_to_end(engine)["slow"].token_ids == say(2)
    engine.check_integrity()
