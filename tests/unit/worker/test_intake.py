from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from shared.tasks import cancel_and_wait
from shared.transport.ports.queue import Delivery
from shared.transport.ports.registry import Order
from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue, make_job
from worker.intake import AdmissionEstimator, Intake, Oversubscription, Overtaking
from worker.running_jobs import RunningJob, RunningJobs
from worker.standing_order import StandingOrder


class EveryFreeSlot(AdmissionEstimator):
    """Estimates that every free slot can be used, and what `more` holds beyond them."""

    more: Oversubscription | None = None
    overtakes: Overtaking | None = None

    def __call__(self) -> int:
        return self._jobs.free_slots

    def oversubscription(self) -> Oversubscription | None:
        return self.more

    def overtaking(self) -> Overtaking | None:
        return self.overtakes


class Bench:
    """An intake whose admitted jobs go straight into the table."""

    def __init__(self, max_num_seqs: int) -> None:
        self.queue = FakeQueue()
        self.jobs = RunningJobs(max_num_seqs)
        self.up = asyncio.Event()
        self.up.set()
        self.is_failing = False
        self.stats: dict[str, int] = {}
        self.ready = None
        self.estimator = EveryFreeSlot(self.jobs, self)
        self.order = StandingOrder("w1", self.jobs)
        self.num_repairs = 0
        self.intake = Intake(
            self.queue,
            "w1",
            self.jobs,
            self,
            self.estimator,
            self.order,
            self._admit,
            self._repair,
            pull_block_ms=10,
            reconcile_interval_s=3600,
        )

    def _admit(self, delivery: Delivery) -> None:
        running = RunningJob.of(delivery)
        self.jobs.add(running)
        for choice in running.choices:
            self.jobs.enter_engine(choice)

    async def _repair(self) -> None:
        self.num_repairs += 1


@asynccontextmanager
async def running(max_num_seqs: int = 2) -> AsyncIterator[Bench]:
    bench = Bench(max_num_seqs)
    task = asyncio.create_task(bench.intake.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])


def delivery(job_id: str, num_choices: int = 1) -> Delivery:
    return Delivery(make_job(job_id, num_choices=num_choices), 1)


async def test_a_job_takes_a_place_for_each_of_its_choices() -> None:
    async with running(max_num_seqs=4) as bench:
        bench.queue.deliveries.extend(delivery(f"0-{i}", num_choices=3) for i in range(3))
        await until(lambda: len(bench.jobs) == 2)
        assert bench.jobs.free_slots == 0
        bench.jobs.remove(next(iter(bench.jobs)))
        await until(lambda: not bench.queue.deliveries)


async def test_no_more_jobs_are_taken_than_the_engine_has_room_for() -> None:
    async with running(max_num_seqs=2) as bench:
        bench.queue.deliveries.extend(delivery(f"0-{i}") for i in range(5))
        await until(lambda: len(bench.jobs) == 2)
        num_pulls = bench.queue.calls.count("pull")
        await asyncio.sleep(0.02)
        assert len(bench.queue.deliveries) == 3
        assert bench.queue.calls.count("pull") == num_pulls
        bench.jobs.remove(next(iter(bench.jobs)))
        await until(lambda: len(bench.queue.deliveries) == 2)


async def test_recovered_jobs_go_before_new_ones() -> None:
    async with running(max_num_seqs=1) as bench:
        bench.queue.recoverable = [delivery("0-old")]
        bench.queue.deliveries.append(delivery("0-new"))
        await until(lambda: len(bench.jobs) == 1)
        assert bench.jobs.ids == {"0-old"}


async def test_lost_deliveries_are_sought_at_the_start_and_when_something_is_suspected() -> None:
    async with running() as bench:
        await until(lambda: bench.queue.calls.count("pull") > 2)
        assert bench.queue.calls[0] == "reconcile"
        assert bench.queue.calls.count("reconcile") == 1
        bench.queue.lost = [delivery("0-lost")]
        bench.intake.suspect()
        await until(lambda: len(bench.jobs) == 1)


async def test_after_an_outage_the_store_is_set_up_again_before_anything_is_taken() -> None:
    async with running() as bench:
        await until(lambda: "pull" in bench.queue.calls)
        bench.queue.away = True
        await until(lambda: bench.num_repairs > 0)
        assert bench.queue.calls[-1] == "reconcile"  # the first thing after every repair
        bench.queue.deliveries.append(delivery("0-a"))
        bench.queue.away = False
        await until(lambda: len(bench.jobs) == 1)


async def test_nothing_is_taken_while_the_engine_is_down() -> None:
    async with running() as bench:
        bench.up.clear()  # before the first round
        bench.queue.deliveries.append(delivery("0-a"))
        await asyncio.sleep(0.03)
        assert bench.queue.calls == []
        bench.up.set()
        await until(lambda: len(bench.jobs) == 1)


async def test_a_job_that_arrives_when_the_engine_has_just_died_is_given_back() -> None:
    async with running() as bench:
        bench.queue.on_pull = bench.up.clear
        bench.queue.deliveries.append(delivery("0-a"))
        await until(lambda: bench.queue.released)
        assert bench.queue.released == [("0-a", 1)]
        assert len(bench.jobs) == 0


async def test_a_device_that_failed_gets_one_job_at_a_time_and_no_suspects() -> None:
    bench = Bench(max_num_seqs=4)
    bench.is_failing = True
    bench.queue.deliveries.extend(delivery(f"j{number}") for number in range(3))
    task = asyncio.create_task(bench.intake.run())
    try:
        await until(lambda: len(bench.jobs) == 1)
        await asyncio.sleep(0.15)  # longer than a look at the room
        assert len(bench.jobs) == 1
        assert "recover" not in bench.queue.calls
        bench.is_failing = False  # its job gave a token
        await until(lambda: len(bench.jobs) == 3)
        assert "recover" in bench.queue.calls
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_suspects_are_tried_on_a_device_that_failed_when_nothing_else_waits() -> None:
    async with running() as bench:
        bench.is_failing = True
        await until(lambda: bench.queue.calls.count("recover") > 2)


async def test_a_full_worker_takes_recovered_jobs_before_it_oversubscribes() -> None:
    async with running(max_num_seqs=1) as bench:
        bench.estimator.more = Oversubscription(1, ())
        bench.queue.deliveries.append(delivery("0-first"))
        await until(lambda: len(bench.jobs) == 1)
        bench.queue.recoverable = [delivery("0-lost")]
        bench.queue.deliveries.append(delivery("0-next"))
        await until(lambda: len(bench.jobs) == 3)
        assert [running.job.job_id for running in bench.jobs] == ["0-first", "0-lost", "0-next"]


async def test_nothing_is_taken_between_an_order_to_drain_and_one_to_serve() -> None:
    async with running(max_num_seqs=4) as bench:
        bench.queue.deliveries.append(delivery("0-before"))
        await until(lambda: len(bench.jobs) == 1)
        bench.order.receive(Order.DRAIN)
        num_calls = len(bench.queue.calls)
        bench.queue.deliveries.append(delivery("0-after"))
        await asyncio.sleep(0.02)
        assert len(bench.queue.calls) <= num_calls + 1, "a pull that was on its way"
        bench.order.receive(None)  # as a server says that has lost the order
        await asyncio.sleep(0.02)
        assert len(bench.queue.calls) <= num_calls + 1
        bench.order.receive(Order.SERVE)
        await until(lambda: bench.jobs.ids == {"0-before", "0-after"})


async def test_an_ordered_exit_comes_after_the_last_job_unless_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.standing_order.LOOK_S", 0.001)
    async with running() as bench:
        bench.queue.deliveries.append(delivery("0-runs"))
        await until(lambda: len(bench.jobs) == 1)
        exiting = asyncio.create_task(bench.order.exit_ordered())
        bench.order.receive(Order.EXIT)
        await asyncio.sleep(0.02)
        assert not exiting.done()
        bench.order.receive(Order.SERVE)
        bench.jobs.remove(next(iter(bench.jobs)))
        await asyncio.sleep(0.02)
        assert not exiting.done()
        bench.order.receive(Order.EXIT)
        await asyncio.wait_for(exiting, 10)


async def test_a_job_of_a_higher_lane_overtakes_where_rows_hold_every_slot() -> None:
    async with running(max_num_seqs=2) as bench:
        bench.estimator.overtakes = Overtaking(2, 7)
        bench.queue.deliveries.extend(
            Delivery(replace(make_job(f"0-row{i}"), lane=7), 1) for i in range(3)
        )
        await until(lambda: len(bench.jobs) == 2)
        bench.queue.deliveries.append(delivery("0-urgent"))
        await until(lambda: len(bench.jobs) == 3)
        assert bench.jobs.ids == {"0-row0", "0-row1", "0-urgent"}


async def test_lost_deliveries_are_looked_for_between_waits_for_jobs_that_overtake() -> None:
    async with running(max_num_seqs=1) as bench:
        bench.estimator.overtakes = Overtaking(1, 7)
        bench.queue.deliveries.append(delivery("0-a"))
        seen: list[bool] = []
        reconcile, overtake = bench.queue.reconcile, bench.queue.overtake
        is_overtaking = False

        async def noted_overtake(*arguments: Any) -> Sequence[Delivery]:
            nonlocal is_overtaking
            is_overtaking = True
            try:
                return await overtake(*arguments)
            finally:
                is_overtaking = False

        async def noted_reconcile(*arguments: Any) -> Sequence[Delivery]:
            seen.append(is_overtaking)
            return await reconcile(*arguments)

        bench.queue.overtake = noted_overtake  # type: ignore[method-assign]
        bench.queue.reconcile = noted_reconcile  # type: ignore[method-assign]
        bench.intake._reconcile_interval_s = 0.001  # each wait for jobs that overtake takes ten
        bench.intake.suspect()
        await until(lambda: bench.queue.calls.count("overtake") >= 5 and len(seen) >= 5)
        assert not any(seen)


async def test_an_outage_while_a_job_may_overtake_ends_with_it() -> None:
    async with running(max_num_seqs=1) as bench:
        bench.estimator.overtakes = Overtaking(1, 7)
        bench.queue.deliveries.append(delivery("0-a"))
        await until(lambda: "overtake" in bench.queue.calls)
        bench.queue.away = True
        await asyncio.sleep(0.05)
        bench.queue.away = False
        await until(lambda: bench.num_repairs == 1)
        bench.queue.deliveries.append(delivery("0-urgent"))
        await until(lambda: len(bench.jobs) == 2)


async def test_an_intake_that_was_cancelled_while_jobs_may_overtake_runs_again() -> None:
    async with running(max_num_seqs=1) as bench:
        bench.estimator.overtakes = Overtaking(1, 7)
        bench.queue.deliveries.append(delivery("0-a"))
        await until(lambda: "overtake" in bench.queue.calls)
    again = asyncio.create_task(bench.intake.run())
    bench.queue.deliveries.append(delivery("0-urgent"))
    await until(lambda: again.done() or len(bench.jobs) == 2)
    assert not again.done()
    await cancel_and_wait(again)
