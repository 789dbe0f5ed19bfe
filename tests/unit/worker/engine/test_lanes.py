"""Lanes in the engine: who gives way to whom, how often, and that nobody loses a token by it."""

from __future__ import annotations

import pytest

from tests.unit.worker.engine.scripted_runner import (
    Story,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.engine import Engine
from worker.engine.running_slots import MAX_LANE_PREEMPTIONS

BATCH = 7


def step(engine: Engine, count: int, stories: dict[str, Story]) -> list[str]:
    """Takes steps; returns the requests that gave way in them, in order."""
    gave_way: list[str] = []
    for _ in range(count):
        tell(stories, engine.step())
        engine.check_integrity()
        gave_way += engine.measures.gave_way
    return gave_way


def running(engine: Engine) -> set[str]:
    return {sequence.request_id for sequence in engine._scheduler.running}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_higher_lane_takes_a_slot_at_once_and_the_row_says_the_same(lookahead: int) -> None:
    engine = make_engine(max_num_seqs=2, policy="priority", lookahead=lookahead)
    stories: dict[str, Story] = {}
    for name in ("row 0", "row 1"):
        engine.add(make_request(name, priority=BATCH, max_tokens=30))
    step(engine, 5, stories)
    engine.add(make_request("urgent", max_tokens=4))
    assert step(engine, 1, stories) == ["row 1"]
    assert running(engine) == {"row 0", "urgent"}
    run_to_end(engine, stories=stories)
    assert stories["row 0"].token_ids == stories["row 1"].token_ids == [100 + i for i in range(30)]
    assert stories["urgent"].token_ids == [100, 101, 102, 103]


def test_the_lowest_lane_gives_way_first_then_who_did_so_least_then_the_last() -> None:
    engine, stories = make_engine(max_num_seqs=4, policy="priority"), dict[str, Story]()
    for name, lane in (("flex", 4), ("a", BATCH), ("b", BATCH), ("c", BATCH)):
        engine.add(make_request(name, priority=lane, max_tokens=60))
    step(engine, 3, stories)
    gave_way: list[str] = []
    for i in range(5):
        engine.add(make_request(f"urgent {i}", max_tokens=3))
        gave_way += step(engine, 6, stories)
    assert gave_way == ["c", "b", "a", "c", "b"]


def test_a_higher_lane_takes_the_blocks_that_it_needs_too() -> None:
    engine = make_engine(max_num_seqs=8, num_blocks=12, policy="priority")
    stories: dict[str, Story] = {}
    for i in range(3):
        engine.add(make_request(f"row {i}", range(13), priority=BATCH, max_tokens=3))
    assert step(engine, 1, stories) == []
    engine.add(make_request("urgent", range(50, 86), max_tokens=3))
    assert step(engine, 1, stories) == ["row 1", "row 0"]
    assert running(engine) == {"urgent"}
    run_to_end(engine, stories=stories)
    assert all(story.token_ids == [100, 101, 102] for story in stories.values())


def test_nobody_gives_way_to_a_prompt_that_would_not_fit_even_so() -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=12, policy="priority")
    stories: dict[str, Story] = {}
    engine.add(make_request("equal", range(20), max_tokens=9))
    engine.add(make_request("row", priority=BATCH, max_tokens=9))
    step(engine, 2, stories)
    engine.add(make_request("urgent", range(50, 82), max_tokens=3))
    assert step(engine, 3, stories) == []
    assert running(engine) == {"equal", "row"}


@pytest.mark.parametrize("shared_with", ["equal", "row", "urgent"])
@pytest.mark.parametrize("num_missing", [0, 1])
def test_blocks_that_several_share_make_way_once(shared_with: str, num_missing: int) -> None:
    """Two rows have a block each beside four common ones."""
    engine = make_engine(max_num_seqs=8, num_blocks=14, policy="priority")
    stories: dict[str, Story] = {}
    common = list(range(16))
    equal = [*common, 60] if shared_with == "equal" else [60]
    engine.add(make_request("equal", equal, max_tokens=20))
    step(engine, 1, stories)
    for i in range(2):
        engine.add(make_request(f"row {i}", [*common, 70 + i], priority=BATCH, max_tokens=20))
        step(engine, 1, stories)
    num_others = 5 if shared_with == "equal" else 1
    urgent = common if shared_with == "urgent" else []
    num_tokens = 4 * (14 - num_others + num_missing) - len(urgent)
    engine.add(make_request("urgent", [*urgent, *range(100, 100 + num_tokens)], max_tokens=1))
    assert step(engine, 1, stories) == ([] if num_missing else ["row 1", "row 0"])


def test_a_sequence_that_gave_way_often_runs_to_its_end() -> None:
    engine, stories = make_engine(max_num_seqs=1, policy="priority"), dict[str, Story]()
    engine.add(make_request("row", priority=BATCH, max_tokens=60))
    gave_way: list[str] = []
    for i in range(10):
        step(engine, 4, stories)
        engine.add(make_request(f"urgent {i}", max_tokens=2))
        gave_way += step(engine, 1, stories)
        has_overtaken = i < MAX_LANE_PREEMPTIONS
        assert (running(engine) == {f"urgent {i}"}) == has_overtaken
    run_to_end(engine, stories=stories)
    assert gave_way == ["row"] * MAX_LANE_PREEMPTIONS
    assert stories["row"].token_ids == [100 + i for i in range(60)]
    assert sum(story.last.finish_reason is not None for story in stories.values()) == 11


def test_what_gave_way_on_earlier_workers_counts() -> None:
    engine, stories = make_engine(max_num_seqs=1, policy="priority"), dict[str, Story]()
    engine.add(make_request("row", priority=BATCH, num_lane_preemptions=MAX_LANE_PREEMPTIONS - 1))
    step(engine, 1, stories)
    engine.add(make_request("urgent 0", max_tokens=2))
    assert step(engine, 1, stories) == ["row"]
    engine.add(make_request("urgent 1", max_tokens=2))
    run_to_end(engine, stories=stories)
    assert engine.stats().preemptions == 1
