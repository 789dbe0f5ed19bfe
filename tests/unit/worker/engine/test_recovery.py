"""Steps that raise: what is computed again, who is ended, and what comes out of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from shared.messages import ErrorCode, FinishReason
from tests.unit.worker.engine.scripted_runner import (
    ScriptedRunner,
    Step,
    Story,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.batch import ScheduledBatch
from worker.engine.engine import Engine
from worker.engine.errors import DeviceLost, OutOfMemory, StepsFailed
from worker.engine.recovery import MAX_FAILED_STEPS, REGROW_STEPS

LOOKAHEADS = pytest.mark.parametrize("lookahead", [0, 1])


def say(length: int) -> list[int]:
    return [100 + i for i in range(length)]


def end(story: Story) -> tuple[FinishReason | None, int | None, ErrorCode | None]:
    return story.last.finish_reason, story.last.stop_reason, story.last.error


BAD_PROMPT = [66, 66, 66]


def fails_from_the_third_token_of(
    prompt: Iterable[int], outputs: int = 2
) -> Callable[[ScheduledBatch], Exception | None]:
    bad = tuple(prompt)

    def judge(batch: ScheduledBatch) -> Exception | None:
        is_bad = any(
            s.prompt_token_ids == bad and s.output_index >= outputs for s in batch.sequences
        )
        return RuntimeError("a shape that this kernel does not know") if is_bad else None

    return judge


def does_not_fit_above(num_tokens: int) -> Callable[[ScheduledBatch], Exception | None]:
    def judge(batch: ScheduledBatch) -> Exception | None:
        return OutOfMemory("full") if batch.num_tokens > num_tokens else None

    return judge


@LOOKAHEADS
@pytest.mark.parametrize("where", ["launch_errors", "collect_errors"])
def test_a_step_that_raises_once_costs_no_sequence_anything(
    lookahead: int, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ScriptedRunner(**{where: {2: RuntimeError("a passing fault")}})
    engine = make_engine(runner, max_num_seqs=2, lookahead=lookahead)
    for name in ("a", "b", "waits"):
        engine.add(make_request(name, max_tokens=9))
    with caplog.at_level(logging.ERROR):
        stories = run_to_end(engine)
    for name in ("a", "b", "waits"):
        assert stories[name].token_ids == say(9)
        assert stories[name].last.finish_reason is FinishReason.LENGTH
    assert engine.stats().failed_steps == 1
    assert engine.stats().free_blocks == engine.stats().total_blocks
    record = next(r for r in caplog.records if r.message == "step failed")
    assert record.exc_info is not None
    assert record.request_ids == ["a", "b"]


@pytest.mark.promise("Streaming: a failing step ends its own streams with an error, and no others")
@LOOKAHEADS
@pytest.mark.parametrize("names", [("bad",), ("a", "bad", "b"), ("bad", "a", "b")])
def test_a_sequence_whose_steps_raise_is_found_and_ends_alone(
    lookahead: int, names: tuple[str, ...]
) -> None:
    runner = ScriptedRunner(judge=fails_from_the_third_token_of(BAD_PROMPT))
    engine = make_engine(runner, lookahead=lookahead)
    for name in names:
        engine.add(make_request(name, BAD_PROMPT if name == "bad" else [1, 2], max_tokens=9))
    stories = run_to_end(engine)
    assert end(stories["bad"]) == (FinishReason.ERROR, None, ErrorCode.ENGINE_ERROR)
    assert stories["bad"].last.message == "the step failed: RuntimeError"
    assert stories["bad"].token_ids == say(2)
    for name in set(names) - {"bad"}:
        assert stories[name].token_ids == say(9)
    assert engine.stats().free_blocks == engine.stats().total_blocks


@LOOKAHEADS
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_lost_device_comes_out_and_ends_no_sequence(lookahead: int, where: str) -> None:
    errors = dict.fromkeys(range(3, 99), DeviceLost("an illegal memory access"))
    runner = ScriptedRunner(**{f"{where}_errors": errors})
    engine = make_engine(runner, lookahead=lookahead)
    stories: dict[str, Story] = {}
    for name in ("a", "b"):
        engine.add(make_request(name, max_tokens=9))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run_to_end(engine, stories=stories)
    for name in ("a", "b"):
        assert stories[name].last.finish_reason is None
        resumed = make_engine()
        output = stories[name].token_ids
        resumed.add(make_request(name, outputs=output, max_tokens=9))
        assert output + run_to_end(resumed)[name].token_ids == say(9)


def test_on_a_device_that_always_raises_none_of_200_requests_is_ended() -> None:
    """Each engine that takes them is a new process; the device says no reason."""
    runner = ScriptedRunner(judge=lambda batch: RuntimeError("no reason given"))
    engine = make_engine(runner, max_waiting=300)
    for number in range(200):
        engine.add(make_request(str(number)))
    with pytest.raises(StepsFailed, match="self-test failed"):
        run_to_end(engine)
    assert len(runner.steps) <= MAX_FAILED_STEPS


def test_steps_that_fail_in_a_row_end_the_engine_whichever_sequences_they_had() -> None:
    """The self-test passes: only what is asked of it makes this device raise."""
    long = range(10, 20)
    runner = ScriptedRunner(judge=fails_from_the_third_token_of(long, outputs=0))
    engine = make_engine(runner)
    for number in range(8):
        engine.add(make_request(str(number), long))
    stories: dict[str, Story] = {}
    with pytest.raises(StepsFailed, match="4 steps failed in a row"):
        run_to_end(engine, stories=stories)
    assert sum(story.last.error is not None for story in stories.values()) <= 2


@LOOKAHEADS
def test_out_of_memory_computes_the_step_again_with_fewer_tokens(lookahead: int) -> None:
    runner = ScriptedRunner(judge=does_not_fit_above(5))
    engine = make_engine(runner, lookahead=lookahead)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, range(20), max_tokens=9))
    stories = run_to_end(engine)
    for name in ("a", "b", "c"):
        assert stories[name].token_ids == say(9)
    assert 0 < engine.stats().failed_steps <= 4


@LOOKAHEADS
def test_where_not_all_decodes_fit_the_youngest_are_preempted(lookahead: int) -> None:
    runner = ScriptedRunner(judge=does_not_fit_above(24))
    sizes = {"num_blocks": 256, "max_num_seqs": 32, "max_num_batched_tokens": 32}
    engine = make_engine(runner, lookahead=lookahead, **sizes)
    names = [str(number) for number in range(32)]
    for number, name in enumerate(names):
        engine.add(make_request(name, [number], max_tokens=12))
    stories: dict[str, Story] = {}
    launched = 0
    while engine.has_unfinished():
        tell(stories, engine.step())
        failed = engine.stats().failed_steps
        ahead = [len(stories[name].token_ids) if name in stories else 0 for name in names[:24]]
        assert max(ahead) - min(ahead) <= 1, ahead  # the oldest lose no step to others
        if failed and not launched:
            launched = len(runner.steps)
    assert all(stories[name].token_ids == say(12) for name in names)
    assert engine.stats().failed_steps == 1
    assert engine.stats().preemptions == 8
    assert all(len(step.order) <= 24 for step in runner.steps[launched + 2 :])


@LOOKAHEADS
def test_of_tenants_the_one_with_most_decodes_gives_way(lookahead: int) -> None:
    runner = ScriptedRunner(judge=does_not_fit_above(6))
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=8, lookahead=lookahead)
    for number in range(6):
        engine.add(make_request(f"a{number}", [number], max_tokens=12, tenant="a"))
    for number in range(2):
        engine.add(make_request(f"b{number}", [number], max_tokens=12, tenant="b"))
    stories: dict[str, Story] = {}
    while engine.has_unfinished():
        tell(stories, engine.step())
        if all(f"b{number}" in stories for number in range(2)):
            ahead = [len(stories[name].token_ids) for name in ("a0", "b0", "b1")]
            assert max(ahead) - min(ahead) <= 2, ahead
    assert all(story.token_ids == say(12) for story in stories.values())
    assert engine.stats().preemptions == 2


def run_beside_decodes(fits: int, lookahead: int) -> tuple[Engine, list[Step]]:
    """Adds a prompt of 24 tokens to four decodes, where a step of `fits` tokens has memory; returns
    the steps from there on."""
    runner = ScriptedRunner(judge=does_not_fit_above(fits))
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=32, lookahead=lookahead)
    for number in range(4):
        engine.add(make_request(str(number), [number], max_tokens=20))
    stories: dict[str, Story] = {}
    for _ in range(3):
        tell(stories, engine.step())
    engine.add(make_request("long", range(24), max_tokens=1))
    before = len(runner.steps)
    run_to_end(engine, stories=stories)
    assert stories["long"].token_ids == say(1)
    return engine, runner.steps[before:]


@LOOKAHEADS
def test_a_prompt_that_does_not_fit_beside_decodes_is_cut_and_they_go_on(lookahead: int) -> None:
    engine, steps = run_beside_decodes(7, lookahead)
    assert engine.stats().failed_steps == 3  # of 24, 12 and 6 prompt tokens
    while_long = [step for step in steps if max(step.counts.values()) > 1]
    assert len(while_long) > 4
    assert all(step.num_decodes == 4 for step in while_long)


@LOOKAHEADS
def test_a_prompt_is_cut_to_nothing_before_a_decode_waits(lookahead: int) -> None:
    _, steps = run_beside_decodes(4, lookahead)
    beside = [step for step in steps if step.num_decodes]
    assert len(beside) > 10
    assert {step.num_decodes for step in beside} == {4}


def test_what_does_not_fit_is_tried_again_after_a_while() -> None:
    sizes: list[int] = []

    def judge(batch: ScheduledBatch) -> Exception | None:
        sizes.append(batch.num_tokens)
        return OutOfMemory("full") if len(sizes) < 3 else None

    engine = make_engine(ScriptedRunner(judge=judge), max_num_batched_tokens=16)
    for number in range(60):
        engine.add(make_request(str(number), range(number, number + 30), max_tokens=2))
    run_to_end(engine)
    assert sizes[:3] == [16, 8, 4]
    assert max(sizes[2 : 2 + REGROW_STEPS]) == 4
    assert max(sizes) == 16
    assert engine.stats().failed_steps == 2


def test_a_sequence_that_does_not_fit_even_alone_ends_and_the_others_go_on() -> None:
    def judge(batch: ScheduledBatch) -> Exception | None:
        tight = any(s.end > 20 for s in batch.sequences)
        return OutOfMemory("full") if tight else None

    engine = make_engine(ScriptedRunner(judge=judge))
    engine.add(make_request("long", range(18), max_tokens=9))
    engine.add(make_request("short", [1, 2], max_tokens=9))
    stories = run_to_end(engine)
    assert end(stories["long"]) == (FinishReason.ERROR, None, ErrorCode.ENGINE_ERROR)
    assert stories["long"].token_ids == say(3)
    assert stories["short"].token_ids == say(9)


def test_no_memory_for_the_smallest_step_comes_out() -> None:
    engine = make_engine(ScriptedRunner(judge=does_not_fit_above(0)))
    engine.add(make_request())
    with pytest.raises(StepsFailed, match="OutOfMemory"):
        run_to_end(engine)


def test_what_a_failed_step_computed_is_never_found() -> None:
    """In the block that it filled, others find nothing before it is computed again."""
    runner = ScriptedRunner(collect_errors={0: RuntimeError("x"), 1: RuntimeError("x")})
    engine = make_engine(runner)
    engine.add(make_request("a", range(20)))
    stories = run_to_end(engine)
    assert stories["a"].last.error is ErrorCode.ENGINE_ERROR
    engine.add(make_request("c", range(20)))
    assert run_to_end(engine)["c"].last.num_cached_tokens == 0


def test_finished_sequences_are_reported_again_after_a_failed_launch() -> None:
    runner = ScriptedRunner(launch_errors={1: RuntimeError("x")})
    engine = make_engine(runner)
    for name in ("a", "b"):
        engine.add(make_request(name, max_tokens=1))
        run_to_end(engine)
    assert [s.finished_seq_ids for s in runner.steps] == [(), (0,), (0,)]


def test_a_self_test_frees_its_blocks_and_is_not_counted() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner)
    before = engine.stats()
    engine.self_test()
    assert len(runner.steps) == 2
    assert engine.stats() == replace(before, cached_blocks=engine.stats().cached_blocks)
    engine.check_integrity()


def test_a_self_test_finds_room_in_a_full_cache() -> None:
    engine = make_engine(num_blocks=5)
    for name in ("a", "b"):
        engine.add(make_request(name, range(7), max_tokens=9))
    stories: dict[str, Story] = {}
    tell(stories, engine.step())
    engine.self_test()
    run_to_end(engine, stories=stories)
    assert stories["a"].token_ids == stories["b"].token_ids == say(9)


def test_a_self_test_sees_numbers_that_are_none() -> None:
    engine = make_engine(ScriptedRunner(failures={0: {0: "nonfinite_logits"}}))
    with pytest.raises(StepsFailed, match="nonfinite_logits"):
        engine.self_test()
