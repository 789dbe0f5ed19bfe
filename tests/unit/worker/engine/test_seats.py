"""Seats are shared among tenants, then among their jobs: who is admitted, who gives a seat up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.worker.engine.scripted_runner import (
    ScriptedRunner,
    Story,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.engine import Engine

SEATS = 8
STEPS_PER_SEAT = 1  # one seat changes hands in a step


def running(engine: Engine) -> Counter[str]:
    """Seats by the first part of the request ids."""
    return Counter(s.request_id.partition("/")[0] for s in engine._scheduler.running)


def add(engine: Engine, name: str, count: int, *, is_one_job: bool = False, **more: object) -> None:
    for i in range(count):
        job_id = name if is_one_job else ""
        request = make_request(f"{name}/{i}", max_tokens=40, job_id=job_id, **more)  # type: ignore[arg-type]
        engine.add(request)


def step(engine: Engine, count: int, stories: dict[str, Story]) -> None:
    for _ in range(count):
        tell(stories, engine.step())
        engine.check_integrity()


@pytest.mark.promise(
    "Access: running jobs share the seats of a worker: a job with many choices or a tenant with "
    "many jobs gives seats to others, and blocks when they run out; `PENSTOCK_ENGINE=vllm` with "
    "vLLM's own sampler shares the seats that become free, and takes none"
)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_job_of_many_choices_gives_seats_to_those_who_come(lookahead: int) -> None:
    engine, stories = make_engine(max_num_seqs=SEATS, lookahead=lookahead), dict[str, Story]()
    add(engine, "wide", 20, is_one_job=True)
    step(engine, 5, stories)
    assert running(engine) == {"wide": SEATS}
    add(engine, "narrow", 3)
    step(engine, 3 * STEPS_PER_SEAT + lookahead, stories)
    assert running(engine) == {"wide": SEATS - 3, "narrow": 3}
    while engine.has_unfinished():
        step(engine, 1, stories)
    texts = {tuple(story.token_ids) for story in stories.values()}
    assert len(stories) == 23
    assert len(texts) == 1, "who gave a seat up says what everybody says"


def test_tenants_settle_at_equal_shares_and_then_none_moves() -> None:
    engine, stories = make_engine(max_num_seqs=SEATS, num_blocks=400), dict[str, Story]()
    add(engine, "flood", 30, tenant="flood")
    step(engine, 3, stories)
    add(engine, "quiet", 30, tenant="quiet")
    step(engine, SEATS, stories)
    assert running(engine) == {"flood": 4, "quiet": 4}
    num_preemptions = engine.stats().preemptions
    assert num_preemptions == 4
    step(engine, 10, stories)
    assert engine.stats().preemptions == num_preemptions


def test_a_single_tenant_uses_every_slot_in_order() -> None:
    engine, stories = make_engine(max_num_seqs=SEATS), dict[str, Story]()
    add(engine, "flood", 30, tenant="flood")
    step(engine, 10, stories)
    assert running(engine) == {"flood": SEATS}
    ids = [s.request_id for s in engine._scheduler.running]
    assert ids == [f"flood/{i}" for i in range(SEATS)]
    assert engine.stats().preemptions == 0


def test_the_free_slot_goes_to_the_tenant_with_the_fewest() -> None:
    engine, stories = make_engine(max_num_seqs=2), dict[str, Story]()
    add(engine, "flood", 4, tenant="flood")
    step(engine, 2, stories)
    engine.add(make_request("quiet/0", tenant="quiet", max_tokens=4))
    step(engine, 2, stories)
    assert running(engine) == {"flood": 1, "quiet": 1}


def test_a_seat_is_not_taken_where_no_blocks_are_free() -> None:
    engine, stories = make_engine(max_num_seqs=4, num_blocks=20), dict[str, Story]()
    add(engine, "wide", 4, is_one_job=True, prompt=range(1, 8))
    step(engine, 2, stories)
    engine.add(make_request("narrow/0", prompt=range(50, 110), max_tokens=4))
    step(engine, 3, stories)
    assert running(engine) == {"wide": 4}
    assert engine.stats().preemptions == 0


def test_under_the_priority_policy_no_sequence_takes_a_seat_from_a_higher_priority() -> None:
    engine = make_engine(max_num_seqs=4, policy="priority")
    stories: dict[str, Story] = {}
    add(engine, "first", 4, is_one_job=True, priority=0)
    step(engine, 2, stories)
    add(engine, "later", 2, priority=5)
    step(engine, 4, stories)
    assert running(engine) == {"first": 4}
    add(engine, "equal", 1, priority=0)
    step(engine, 2, stories)
    assert running(engine) == {"first": 3, "equal": 1}


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_tenants_and_jobs_comes_to_its_end(seed: int) -> None:
    """Every sequence says the same as alone, however often it gave its seat up."""
    rng = random.Random(seed)
    runner = ScriptedRunner()
    engine = make_engine(
        runner,
        max_num_seqs=rng.randint(1, 6),
        num_blocks=rng.randint(20, 60),
        lookahead=rng.randint(0, 1),
        policy=rng.choice(["fcfs", "priority"]),
    )
    stories: dict[str, Story] = {}
    for i in range(25):
        engine.add(
            make_request(
                str(i),
                range(1, rng.randint(2, 20)),
                tenant=rng.choice("abc"),
                job_id=rng.choice(["", "x", "y"]),
                priority=rng.randint(0, 2),
                max_tokens=6,
            )
        )
        step(engine, rng.randint(0, 3), stories)
    for name, story in run_to_end(engine).items():
        if name in stories:
            stories[name].token_ids += story.token_ids
        else:
            stories[name] = story
    assert {tuple(story.token_ids) for story in stories.values()} == {
        tuple(100 + i for i in range(6))
    }
    assert len(stories) == 25


@pytest.mark.parametrize("lookahead", [0, 1])
def test_who_fills_the_blocks_pays_for_it_and_not_who_comes_late(lookahead: int) -> None:
    """The flood's outputs outgrow the blocks again and again, while there are seats for all."""
    engine = make_engine(max_num_seqs=64, num_blocks=60, lookahead=lookahead)
    stories = dict[str, Story]()
    for i in range(30):
        engine.add(make_request(f"flood/{i}", max_tokens=60, tenant="flood"))
    step(engine, 20, stories)
    assert engine._scheduler.num_preemptions > 0
    for i in range(3):
        engine.add(make_request(f"late/{i}", max_tokens=30, tenant=f"late-{i}"))
        step(engine, 3 + lookahead, stories)
        assert stories[f"late/{i}"].token_ids, "a newcomer waits for no end of the flood's"
    late = [s for s in engine._scheduler.running if s.request_id.startswith("late")]
    before = {name: len(story.token_ids) for name, story in stories.items() if "late" in name}
    step(engine, 10, stories)
    assert [s.num_preemptions for s in late] == [0, 0, 0]
    assert all(len(stories[name].token_ids) >= had + 9 for name, had in before.items())
    while engine.has_unfinished():
        step(engine, 1, stories)
    assert len(stories) == 33
