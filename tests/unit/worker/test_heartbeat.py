from __future__ import annotations

import asyncio

from shared.messages import SamplingParams
from tests.unit.worker.fakes import ByteTokenizer, FakeQueue, make_job, until
from worker.heartbeat import Heartbeat
from worker.output import OutputProcessor
from worker.running_jobs import RunningJob, RunningJobs


class Bench:
    """A heart with two switches: is the engine stalled, is it lost."""

    def __init__(self) -> None:
        self.queue = FakeQueue()
        self.jobs = RunningJobs(4)
        self.stalled = False
        self.lost = False
        self.dropped: list[tuple[str, int]] = []
        self.num_troubles = 0
        self.heartbeat = Heartbeat(
            self.queue,
            "w1",
            ("m",),
            self.jobs,
            lease_ms=5000,
            interval_s=0.001,
            stats=lambda: {"step": 7},
            is_stalled=lambda: self.stalled,
            is_lost=lambda: self.lost,
            on_drop=lambda job_id, attempt: self.dropped.append((job_id, attempt)),
            on_trouble=self._trouble,
        )

    def _trouble(self) -> None:
        self.num_troubles += 1

    def add(self, job_id: str, attempt: int) -> None:
        out = OutputProcessor(ByteTokenizer(), SamplingParams())
        self.jobs.add(RunningJob(make_job(job_id), attempt, out, 0, 0, None))


async def test_a_beat_says_who_runs_and_how_busy() -> None:
    bench = Bench()
    bench.add("0-a", 3)
    bench.stalled = True
    bench.heartbeat.draining = True
    await bench.heartbeat.beat()
    (beat,) = bench.queue.beats
    assert beat.running == (("0-a", 3),)
    assert beat.stats == {"step": 7}
    assert (beat.models, beat.lease_ms, beat.draining, beat.stalled) == (("m",), 5000, True, True)


async def test_jobs_to_drop_are_named_with_the_attempt_that_the_beat_spoke_of() -> None:
    bench = Bench()
    bench.add("0-a", 1)
    bench.queue.drops = ["0-a", "0-unknown"]
    await bench.heartbeat.beat()
    assert bench.dropped == [("0-a", 1)]


async def test_a_worker_whose_engine_is_lost_does_not_beat_while_it_has_jobs() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        bench.lost = True
        await until(lambda: bench.queue.beats)  # no jobs: nothing to take from it
        bench.add("0-a", 1)
        await asyncio.sleep(0.01)
        num_beats = len(bench.queue.beats)
        await asyncio.sleep(0.03)
        assert len(bench.queue.beats) == num_beats
        bench.lost = False
        await until(lambda: len(bench.queue.beats) > num_beats)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_lost_beat_is_trouble_and_the_heart_goes_on() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.heartbeat.run())
    try:
        bench.queue.away = True
        await until(lambda: bench.num_troubles > 1)
        bench.queue.away = False
        await until(lambda: bench.queue.beats)
    finally:
        task.cancel()
        await asyncio.wait([task])
