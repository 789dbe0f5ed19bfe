"""What one step computes: limits, order, mixing, preemption, prefix hits, refusal."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.messages import ErrorCode, FinishReason, SamplingParams
from tests.unit.worker.engine.scripted_runner import (
    ScriptedRunner,
    Story,
    make_config,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.batch import ScheduledSequence
from worker.engine.engine import Engine
from worker.engine.errors import RequestRefused
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence

LOOKAHEADS = pytest.mark.parametrize("lookahead", [0, 1])


def say(length: int) -> list[int]:
    return [100 + i for i in range(length)]


@pytest.mark.promise("Engine: seats and token budget are never exceeded")
def test_limits_are_never_exceeded_in_any_step() -> None:
    rng = random.Random(1)
    for _ in range(30):
        runner = ScriptedRunner()
        seats, budget = rng.randint(1, 6), rng.randint(1, 20)
        engine = make_engine(
            runner, max_num_seqs=seats, max_num_batched_tokens=budget, num_blocks=40
        )
        for i in range(12):
            engine.add(make_request(str(i), range(1, rng.randint(2, 40)), max_tokens=6))
        stories = run_to_end(engine)
        assert all(story.token_ids == say(6) for story in stories.values())
        for step in runner.steps:
            assert 0 < sum(step.counts.values()) <= budget
            assert len(step.counts) <= seats


def test_a_long_prompt_is_computed_in_chunks_that_fill_the_budget() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_batched_tokens=10)
    engine.add(make_request(prompt=range(25), max_tokens=1))
    assert run_to_end(engine)["a"].token_ids == say(1)
    assert [step.counts[0] for step in runner.steps] == [10, 10, 5]
    assert [step.starts[0] for step in runner.steps] == [0, 10, 20]


@pytest.mark.promise("Streaming: a long prompt is computed in chunks beside running streams")
@LOOKAHEADS
def test_decodes_go_on_beside_a_long_prefill_and_come_first_in_the_batch(lookahead: int) -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_batched_tokens=8, lookahead=lookahead)
    engine.add(make_request("talker", [1, 2, 3], max_tokens=20))
    stories: dict[str, Story] = {}
    for _ in range(3):
        tell(stories, engine.step())
    engine.add(make_request("reader", range(100, 140), max_tokens=2))
    num_before = len(runner.steps)
    while engine.has_unfinished():
        tell(stories, engine.step())
    mixed = [s for s in runner.steps[num_before:] if 1 in s.counts and s.starts[1] < 35]
    assert len(mixed) == 5  # 40 prompt tokens, 7 a step beside one decode, the last 5 apart
    assert all(step.counts == {0: 1, 1: 7} and step.order == [0, 1] for step in mixed)
    assert all(step.num_decodes == 1 for step in mixed)
    assert engine.stats().mixed_steps >= 5
    assert stories["reader"].token_ids == say(2)
    assert stories["talker"].token_ids == say(20)


def test_a_decode_never_waits_for_a_prefill_of_higher_rank() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_batched_tokens=6, policy="priority")
    engine.add(make_request("low", [1], max_tokens=20, priority=5))
    engine.step()
    engine.add(make_request("high", range(60), max_tokens=2, priority=0))
    run_to_end(engine)
    for step in runner.steps[1:12]:
        assert step.counts[0] == 1


def test_more_slots_than_budget_starve_no_sequence() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=3)
    for i in range(6):
        engine.add(make_request(str(i), [1], max_tokens=5))
    run_to_end(engine)
    for i in range(6):
        steps = [n for n, step in enumerate(runner.steps) if i in step.counts]
        assert steps == list(range(steps[0], steps[0] + 5))


def test_a_one_token_chunk_that_samples_nothing_is_no_decode() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_batched_tokens=2)
    engine.add(make_request("a", [1], max_tokens=3))
    engine.add(make_request("b", [1, 2, 3], max_tokens=1))
    engine.step()
    assert runner.steps[0].counts == {0: 1, 1: 1}
    assert runner.steps[0].num_decodes == 1


def test_tokens_got_from_the_cache_do_not_count_against_the_budget() -> None:
    runner = ScriptedRunner()
    engine = make_engine(
        runner, num_blocks=800, block_size=16, max_num_batched_tokens=512, max_model_len=12_000
    )
    prompt = [i % 900 for i in range(10_000)]
    engine.add(make_request("warm", prompt[:9_900], max_tokens=1))
    run_to_end(engine)
    num_before = len(runner.steps)
    engine.add(make_request("hit", prompt, max_tokens=1))
    story = run_to_end(engine)["hit"]
    assert len(runner.steps) == num_before + 1
    assert runner.steps[-1].counts == {1: 10_000 - 9_888}
    assert story.last.num_cached_tokens == 9_888  # the whole blocks of 9 900 tokens
    assert engine.stats().prefix_hit_tokens == 9_888
    assert engine.stats().prompt_tokens == 9_900 + 10_000


@pytest.mark.promise("Engine: a prompt is admitted when all of it fits, and waits otherwise")
def test_admission_waits_until_the_whole_prompt_fits() -> None:
    engine = make_engine(num_blocks=12, max_num_batched_tokens=100, prefix_caching=False)
    for i in range(5):
        engine.add(make_request(str(i), range(18), max_tokens=3))  # five blocks each
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    stories = run_to_end(engine)
    assert len(stories) == 5
    assert all(story.last.finish_reason is FinishReason.LENGTH for story in stories.values())
    assert engine.stats().preemptions == 0


def history(item: ScheduledSequence) -> int:
    """The next token depends on all of the sequence's own."""
    return hash((*item.prompt_token_ids, *item.output_token_ids)) % 900


@pytest.mark.promise("Engine: short of blocks, the youngest is preempted; no output changes")
@LOOKAHEADS
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_sequences_say_what_uncontended_ones_say(
    lookahead: int, prefix_caching: bool
) -> None:
    def run(num_blocks: int) -> tuple[Engine, dict[str, list[int]]]:
        # `history` reads outputs that lookahead has not seen yet, so count there instead.
        runner = ScriptedRunner() if lookahead else ScriptedRunner(history)
        engine = make_engine(
            runner, num_blocks=num_blocks, lookahead=lookahead, prefix_caching=prefix_caching
        )
        for i in range(8):
            engine.add(make_request(str(i), [i, i + 1, i + 2], max_tokens=40))
        return engine, {name: s.token_ids for name, s in run_to_end(engine).items()}

    contended, outputs = run(20)
    free, expected = run(1000)
    assert contended.stats().preemptions > 0
    assert free.stats().preemptions == 0
    assert outputs == expected
    assert contended.stats().prompt_tokens == 8 * 3  # recomputing does not count twice
    assert contended.stats().generated_tokens == 8 * 40


@pytest.mark.promise("Engine: a preempted sequence resumes before new ones, from the cache")
def test_the_youngest_is_preempted_and_resumes_before_newcomers_out_of_the_cache() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, num_blocks=9, block_size=4, max_num_batched_tokens=64)
    engine.add(make_request("old", range(100, 111), max_tokens=8))
    engine.add(make_request("young", range(200, 212), max_tokens=12))
    stories: dict[str, Story] = {}
    tell(stories, engine.step())
    engine.add(make_request("new", range(300, 308), max_tokens=2))
    while engine.has_unfinished():
        tell(stories, engine.step())
        engine.check_integrity()
    assert engine.stats().preemptions == 1
    order = [step.order for step in runner.steps]
    pause = order.index([0])
    back = next(n for n in range(pause, len(order)) if 1 in order[n])
    assert not any(2 in step for step in order[:back])  # young comes back before new
    assert runner.steps[back].starts[1] >= 8  # what it had computed was still there
    assert stories["young"].token_ids == say(12)
    assert engine.stats().prefix_hit_tokens >= 8
    assert stories["young"].last.num_cached_tokens == 0  # of the first admission


def test_a_lone_sequence_preempts_none_when_it_fills_the_pool_exactly() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add(make_request(prompt=range(10), max_tokens=7))  # its last token needs no place
    story = run_to_end(engine)["a"]
    assert (len(story.token_ids), story.last.finish_reason) == (7, FinishReason.LENGTH)
    assert engine.stats().preemptions == 0


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on() -> None:
    engine = make_engine(num_blocks=2, block_size=4)
    engine.add(make_request("fits", range(8), max_tokens=1))
    with pytest.raises(RequestRefused) as refusal:
        engine.add(make_request("never", range(9)))
    assert refusal.value.code is ErrorCode.KV_CAPACITY_EXCEEDED
    assert list(run_to_end(engine)) == ["fits"]


@LOOKAHEADS
def test_a_sequence_that_outgrows_the_pool_ends_there_and_others_go_on(lookahead: int) -> None:
    engine = make_engine(num_blocks=4, block_size=4, lookahead=lookahead)
    engine.add(make_request("grows", range(10), max_tokens=50))
    engine.add(make_request("small", [1, 2], max_tokens=3))
    stories = run_to_end(engine)
    grown = stories["grows"]
    assert grown.token_ids == say(7)  # 16 places, and one token that needs none
    assert grown.last.finish_reason is FinishReason.ERROR
    assert grown.last.error is ErrorCode.KV_CAPACITY_EXCEEDED
    assert "16 tokens" in grown.last.message
    assert stories["small"].token_ids == say(3)
    assert engine.stats().free_blocks == 4


def test_a_waiting_sequence_larger_than_the_pool_ends_and_others_continue() -> None:
    scheduler = Scheduler(make_config(num_blocks=2, block_size=4))
    large, small = (
        Sequence(
            seq_id=seq_id,
            request_id=str(seq_id),
            prompt_token_ids=tuple(range(length)),
            params=SamplingParams(),
            max_model_len=100,
        )
        for seq_id, length in ((0, 9), (1, 3))
    )
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.schedule().outgrown == (large,)
    scheduler.finish(large)
    assert [item.sequence for item in scheduler.schedule().planned] == [small]


def test_a_stop_on_the_token_that_would_outgrow_the_pool_is_a_stop() -> None:
    for lookahead in (0, 1):
        runner = ScriptedRunner(lambda item: 999 if item.end == 16 else 5)
        engine = make_engine(runner, num_blocks=4, block_size=4, lookahead=lookahead)
        engine.add(make_request(prompt=range(10), max_tokens=50))
        assert run_to_end(engine)["a"].last.finish_reason is FinishReason.STOP


def test_an_admission_leaves_the_running_room_to_grow() -> None:
    engine = make_engine(num_blocks=10, block_size=4, max_num_batched_tokens=64)
    engine.add(make_request("a", range(16), max_tokens=4))
    engine.step()
    engine.add(make_request("b", range(100, 120), max_tokens=4))
    run_to_end(engine)
    assert engine.stats().preemptions == 0


def test_no_step_is_launched_beyond_the_last_token() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, lookahead=1)
    engine.add(make_request(prompt=[1, 2, 3], max_tokens=5))
    assert run_to_end(engine)["a"].token_ids == say(5)
    assert len(runner.steps) == 5


def test_the_runner_hears_of_each_gone_sequence_once_and_never_of_unlaunched_ones() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, max_num_seqs=1)
    for i in range(4):
        engine.add(make_request(str(i), [1, 2], max_tokens=2))
    engine.step()
    engine.cancel("2")  # never ran
    run_to_end(engine)
    assert [s.finished_seq_ids for s in runner.steps if s.finished_seq_ids] == [(0,), (1,)]


@LOOKAHEADS
@pytest.mark.parametrize("next_token", [lambda item: 7, history])
def test_equal_prompts_share_their_blocks_from_the_next_step_on(
    lookahead: int, next_token: Callable[[ScheduledSequence], int]
) -> None:
    runner = ScriptedRunner(next_token)
    engine = make_engine(runner, lookahead=lookahead)
    engine.add(make_request("a", range(17), max_tokens=8))
    for _ in range(1 + lookahead):
        engine.step()
    engine.add(make_request("b", range(17), max_tokens=8))
    engine.step()
    step = runner.steps[-1]
    assert step.tables[1][:4] == step.tables[0][:4]
    assert step.starts[1] == 16
    assert run_to_end(engine)["b"].last.num_cached_tokens == 16
