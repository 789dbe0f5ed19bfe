"""How many choices a worker takes, by places in the batch and by free KV blocks."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

import msgspec
import pytest

from shared.transport.ports.queue import Delivery
from tests.unit.worker.fakes import make_job
from worker.engine.config import EngineConfig
from worker.engine.running_slots import MAX_LANE_PREEMPTIONS
from worker.intake import MAX_NOT_BEGUN, AdmissionEstimator, Overtaking
from worker.running_jobs import RunningJob, RunningJobs
from worker.runtime.messages import EngineReady

BLOCK_SIZE = 16


def ready(num_blocks: int, window: int | None = None) -> EngineReady:
    return EngineReady(
        config=EngineConfig(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=8, windows=(window,)
        ),
        vocab_size=100,
        num_parameters=0,
        dtype="",
        load_s=0.0,
        stats={},
    )


@dataclass
class Engine:
    """The supervisor's view of an engine, with its last report."""

    up: asyncio.Event = field(default_factory=asyncio.Event)
    is_failing: bool = False

    ready: EngineReady | None = field(default_factory=lambda: ready(100))
    stats: dict[str, int] = field(default_factory=lambda: {"free_blocks": 100})


@pytest.fixture
def jobs() -> RunningJobs:
    return RunningJobs(8)


def delivery(job_id: str, num_prompt_tokens: int) -> Delivery:
    return Delivery(make_job(job_id, prompt=(1,) * num_prompt_tokens), 1)


def take(jobs: RunningJobs, estimator: AdmissionEstimator, taken: Delivery) -> RunningJob:
    estimator.took([taken])
    running = RunningJob.of(taken)
    jobs.add(running)
    for choice in running.choices:
        jobs.enter_engine(choice)
    return running


def begin(running: RunningJob, engine: Engine) -> None:
    """Its first token has come: from now on the engine's own count has its blocks."""
    running.first_token_s = 1.0
    engine.stats["free_blocks"] -= -(-len(running.job.prompt_token_ids) // BLOCK_SIZE)


def test_a_long_prompt_counts_with_what_its_window_and_a_step_hold(jobs: RunningJobs) -> None:
    engine = Engine(ready=ready(100, window=64))
    estimator = AdmissionEstimator(jobs, engine)
    take(jobs, estimator, delivery("a", 10_000))  # holds a step of 512 and 64: 37 of 100 blocks
    assert estimator() == 1
    engine.ready = ready(100)
    assert estimator() == 0


def test_short_prompts_are_limited_by_places_alone(jobs: RunningJobs) -> None:
    engine = Engine()
    estimator = AdmissionEstimator(jobs, engine)
    assert estimator() == 1  # nothing is known of the prompts yet
    for index in range(8):
        begin(take(jobs, estimator, delivery(f"0-{index}", 20)), engine)
        assert estimator() == 7 - index


def test_before_the_first_prompt_as_many_are_taken_as_would_fit_at_their_longest(
    jobs: RunningJobs,
) -> None:
    config = dataclasses.replace(ready(100).config, max_model_len=500)
    engine = Engine(ready=msgspec.structs.replace(ready(100), config=config))
    assert AdmissionEstimator(jobs, engine)() == 3  # of the 1600 tokens that are free


def test_long_prompts_are_taken_as_far_as_their_blocks_reach(jobs: RunningJobs) -> None:
    engine = Engine()
    estimator = AdmissionEstimator(jobs, engine)
    begin(take(jobs, estimator, delivery("0-1", 640)), engine)  # 40 of 100 blocks
    assert estimator() == 1
    begin(take(jobs, estimator, delivery("0-2", 640)), engine)
    assert estimator() == 1  # it will not fit, but the engine shall have it when a block comes free
    take(jobs, estimator, delivery("0-3", 640))
    assert estimator() == 0  # one of these is enough; other workers may have blocks


def test_jobs_without_a_first_token_count_before_the_engine_reports_them(jobs: RunningJobs) -> None:
    engine = Engine()
    estimator = AdmissionEstimator(jobs, engine)
    take(jobs, estimator, delivery("0-1", 800))
    assert estimator() == 1
    take(jobs, estimator, delivery("0-2", 800))
    assert estimator() == 0


def test_no_more_is_taken_than_begins_soon_however_many_places_there_are() -> None:
    jobs, engine = RunningJobs(256), Engine(ready(10_000), {"free_blocks": 10_000})
    estimator = AdmissionEstimator(jobs, engine)
    begin(take(jobs, estimator, delivery("0-0", 20)), engine)
    waiting = [take(jobs, estimator, delivery(f"1-{index}", 20)) for index in range(estimator())]
    assert len(waiting) == MAX_NOT_BEGUN
    assert estimator() == 0, "another worker may begin the next one sooner"
    held_back = estimator.oversubscription()
    assert held_back is not None, "others have places"
    assert held_back.leave_out == ("default",)
    begin(waiting[0], engine)
    begin(waiting[1], engine)
    assert estimator() == 2


def test_a_finished_job_makes_room(jobs: RunningJobs) -> None:
    engine = Engine()
    estimator = AdmissionEstimator(jobs, engine)
    for index in range(2):
        running = take(jobs, estimator, delivery(f"0-{index}", 800))
    assert estimator() == 0
    jobs.remove(running)
    assert estimator() == 1


def test_before_its_first_report_an_engine_gets_jobs_only_for_its_slots(
    jobs: RunningJobs,
) -> None:
    assert AdmissionEstimator(jobs, Engine(ready=None))() == 8


def place(
    jobs: RunningJobs, engine: Engine, job_id: str, tenant: str, num_choices: int = 1
) -> None:
    job = dataclasses.replace(make_job(job_id, num_choices=num_choices), tenant=tenant)
    begin(take(jobs, AdmissionEstimator(jobs, engine), Delivery(job, 1)), engine)


@pytest.mark.parametrize(
    ("held", "left_out"),
    [
        ([("wide", "a", 8)], ()),  # others of the same tenant get seats of a wide job
        ([(f"{i}", "a", 1) for i in range(8)], ("a",)),
        ([*((f"{i}", "a", 1) for i in range(6)), ("7", "b", 1), ("8", "c", 1)], ("a",)),
        ([(f"{i}", "ab"[i % 2], 1) for i in range(8)], ("a", "b")),
    ],
)
def test_without_a_free_seat_jobs_are_pulled_that_get_one_from_others(
    jobs: RunningJobs, held: list[tuple[str, str, int]], left_out: tuple[str, ...]
) -> None:
    engine = Engine()
    for job_id, tenant, num_choices in held:
        place(jobs, engine, f"0-{job_id}", tenant, num_choices)
    assert jobs.free_slots == 0
    more = AdmissionEstimator(jobs, engine).oversubscription()
    assert more is not None
    assert (more.count, more.leave_out) == (1, left_out)


def test_no_job_is_pulled_when_no_slot_can_be_freed(jobs: RunningJobs) -> None:
    engine = Engine()
    for index in range(8):
        place(jobs, engine, f"0-{index}", f"tenant-{index}")
    assert AdmissionEstimator(jobs, engine).oversubscription() is None


def test_no_more_is_taken_without_a_place_than_has_begun_and_one_without_blocks(
    jobs: RunningJobs,
) -> None:
    engine = Engine()
    place(jobs, engine, "0-wide", "a", num_choices=8)
    estimator = AdmissionEstimator(jobs, engine)
    assert estimator.oversubscription() is not None
    running = take(jobs, estimator, delivery("0-1", 16))
    assert estimator.oversubscription() is None  # the last one has not begun
    begin(running, engine)
    assert estimator.oversubscription() is not None
    engine.stats["free_blocks"] = 0
    one = estimator.oversubscription()
    assert one is not None
    assert one.count == 1, "it gets blocks of whoever holds many seats"
    take(jobs, estimator, delivery("0-2", 16))
    assert estimator.oversubscription() is None


def test_waiting_jobs_of_a_large_holder_keep_no_others_out(jobs: RunningJobs) -> None:
    engine = Engine()
    for index in range(8):
        place(jobs, engine, f"0-{index}", "large")
    estimator = AdmissionEstimator(jobs, engine)
    for index in range(8, 12):  # taken with others behind them
        waits = dataclasses.replace(make_job(f"0-{index}"), tenant="large")
        take(jobs, estimator, Delivery(waits, 1))
    more = estimator.oversubscription()
    assert more is not None
    assert (more.count, more.leave_out) == (1, ("large",))


def lane_job(jobs: RunningJobs, engine: Engine, job_id: str, lane: int) -> RunningJob:
    job = dataclasses.replace(make_job(job_id), lane=lane)
    running = take(jobs, AdmissionEstimator(jobs, engine), Delivery(job, 1))
    begin(running, engine)
    return running


def test_a_worker_full_of_rows_takes_what_would_preempt_them(jobs: RunningJobs) -> None:
    engine, estimator = Engine(), AdmissionEstimator(jobs, Engine())
    lane_job(jobs, engine, "0-first", 0)
    rows = [lane_job(jobs, engine, f"0-{i}", 7) for i in range(6)]
    assert estimator.overtaking() is None, "a slot is free"
    lane_job(jobs, engine, "0-flex", 4)
    assert estimator.overtaking() == Overtaking(6, 7)
    lane_job(jobs, engine, "0-overtook", 0)
    assert estimator.overtaking() == Overtaking(5, 7), "a row waits for it"
    for row in rows:
        row.choices[0].num_lane_preemptions = MAX_LANE_PREEMPTIONS
    assert estimator.overtaking() is None, (
        "these run to their ends, and a row of flex is soon taken"
    )
    jobs.remove(rows[0])
    assert estimator.overtaking() == Overtaking(1, 4)


def test_nothing_overtakes_where_the_engine_does_not_preempt(jobs: RunningJobs) -> None:
    engine = Engine()
    for i in range(8):
        lane_job(jobs, engine, f"0-{i}", 7)
    assert AdmissionEstimator(jobs, engine).overtaking() == Overtaking(8, 7)
    assert engine.ready is not None
    config = dataclasses.replace(engine.ready.config, preempts=False)
    engine.ready = msgspec.structs.replace(engine.ready, config=config)
    assert AdmissionEstimator(jobs, engine).overtaking() is None


def test_nothing_overtakes_the_first_lane(jobs: RunningJobs) -> None:
    engine = Engine()
    for i in range(8):
        lane_job(jobs, engine, f"0-{i}", 0)
    assert AdmissionEstimator(jobs, engine).overtaking() is None
