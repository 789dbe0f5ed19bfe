"""How many choices a worker takes, by places in the batch and by free KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shared.transport.base import Delivery
from tests.unit.worker.fakes import make_job
from worker.engine_messages import EngineReady
from worker.intake_room import IntakeRoom
from worker.running_jobs import RunningJob, RunningJobs

BLOCK_SIZE = 16


def ready(num_blocks: int) -> EngineReady:
    return EngineReady(
        max_model_len=4096,
        vocab_size=100,
        eos_token_ids=(),
        num_parameters=0,
        kv_capacity_tokens=num_blocks * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=8,
        dtype="",
        load_s=0.0,
        stats={},
    )


@dataclass
class Engine:
    """Its last word."""

    ready: EngineReady | None = field(default_factory=lambda: ready(100))
    stats: dict[str, int] = field(default_factory=lambda: {"free_blocks": 100})


@pytest.fixture
def jobs() -> RunningJobs:
    return RunningJobs(8)


def delivery(job_id: str, num_prompt_tokens: int) -> Delivery:
    return Delivery(make_job(job_id, prompt=(1,) * num_prompt_tokens), 1)


def take(jobs: RunningJobs, room: IntakeRoom, taken: Delivery) -> RunningJob:
    room.took([taken])
    running = RunningJob.of(taken)
    jobs.add(running)
    for choice in running.choices:
        jobs.enter_engine(choice)
    return running


def begin(running: RunningJob, engine: Engine) -> None:
    """Its first token has come: from now on the engine's own count has its blocks."""
    running.first_token_s = 1.0
    engine.stats["free_blocks"] -= -(-len(running.job.prompt_token_ids) // BLOCK_SIZE)


def test_short_prompts_are_limited_by_places_alone(jobs: RunningJobs) -> None:
    engine = Engine()
    room = IntakeRoom(jobs, engine)
    assert room() == 1  # nothing is known of the prompts yet
    for index in range(8):
        begin(take(jobs, room, delivery(f"0-{index}", 20)), engine)
        assert room() == 7 - index


def test_long_prompts_are_taken_as_far_as_their_blocks_reach(jobs: RunningJobs) -> None:
    engine = Engine()
    room = IntakeRoom(jobs, engine)
    begin(take(jobs, room, delivery("0-1", 640)), engine)  # 40 of 100 blocks
    assert room() == 1
    begin(take(jobs, room, delivery("0-2", 640)), engine)
    assert room() == 1  # it will not fit, but the engine shall have it when a block comes free
    take(jobs, room, delivery("0-3", 640))
    assert room() == 0  # one of these is enough; other workers may have blocks


def test_what_has_not_begun_counts_before_the_engine_says_so(jobs: RunningJobs) -> None:
    engine = Engine()
    room = IntakeRoom(jobs, engine)
    take(jobs, room, delivery("0-1", 800))
    assert room() == 1
    take(jobs, room, delivery("0-2", 800))
    assert room() == 0


def test_a_finished_job_makes_room(jobs: RunningJobs) -> None:
    engine = Engine()
    room = IntakeRoom(jobs, engine)
    for index in range(2):
        running = take(jobs, room, delivery(f"0-{index}", 800))
    assert room() == 0
    jobs.remove(running)
    assert room() == 1


def test_an_engine_that_has_not_spoken_is_asked_for_nothing_more_than_places(
    jobs: RunningJobs,
) -> None:
    assert IntakeRoom(jobs, Engine(ready=None))() == 8
