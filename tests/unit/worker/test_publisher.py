from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from shared.messages import START, FinishReason, JobState, Usage
from shared.transport.ports.jobs import Restored
from shared.transport.ports.queue import Append, AppendResult, AppendStatus, JobEnd, JobSnapshot
from shared.transport.wire import chain_hash
from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue, accepted
from worker.outbox import Outbox, Settled
from worker.publisher import FlushPolicy, Publisher

END = JobEnd(state=JobState.FINISHED, reason=FinishReason.STOP, usage=Usage(1, 1))


class Bench:
    """A publisher over a fake queue, and its callbacks."""

    def __init__(self, policy: FlushPolicy) -> None:
        self.queue = FakeQueue()
        self.outboxes: dict[str, Outbox] = {}
        self.settled: list[Settled] = []
        self.rejected: list[tuple[str, int]] = []
        self.put_off: list[tuple[str, int]] = []
        self.num_troubles = 0
        self.lags_s: list[float] = []
        self.publisher = Publisher(
            self.queue,
            "w1",
            5000,
            policy,
            on_settled=self.settled.append,
            on_rejected=lambda job_id, attempt: self.rejected.append((job_id, attempt)),
            on_trouble=self._trouble,
            on_published=self.lags_s.append,
            on_put_off=self._put_off,
        )

    def _put_off(self, job_id: str, attempt: int) -> None:
        self.put_off.append((job_id, attempt))
        self.publisher.drop(job_id)

    def _trouble(self) -> None:
        self.num_troubles += 1

    def say(self, job_id: str, token_ids: Sequence[int], text: str) -> None:
        self.outboxes[job_id].add(token_ids, text, None)
        self.publisher.notice(self.outboxes[job_id])

    def finish(self, job_id: str, end: JobEnd) -> None:
        self.outboxes[job_id].finish(end)
        self.publisher.notice(self.outboxes[job_id])

    def open(self, outbox: Outbox) -> None:
        self.outboxes[outbox.job_id] = outbox
        self.publisher.open(outbox)

    @property
    def sent(self) -> list[Append]:
        return [item for items in self.queue.appended for item in items]


@asynccontextmanager
async def running(*, limit: int = 256, policy: FlushPolicy | None = None) -> AsyncIterator[Bench]:
    bench = Bench(
        policy or FlushPolicy(flush_interval_s=0.0, flush_tokens=8, max_unflushed_tokens=limit)
    )
    task = asyncio.create_task(bench.publisher.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_all_jobs_of_a_step_go_in_one_call() -> None:
    async with running() as bench:
        for job_id in ("0-a", "0-b", "0-c"):
            bench.open(Outbox(job_id, 1, START, ()))
            bench.say(job_id, (1,), "x")
        await bench.publisher.flushed()
        assert [[item.job_id for item in items] for items in bench.queue.appended] == [
            ["0-a", "0-b", "0-c"]
        ]


async def test_the_end_travels_with_the_last_tokens() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.say("0-a", (1, 2), "xy")
        bench.finish("0-a", END)
        await until(lambda: bench.settled)
        assert len(bench.sent) == 1
        assert bench.sent[0].delta.token_ids == (1, 2)
        assert bench.sent[0].end_of_job == END
        assert bench.settled == [Settled("0-a", 1, AppendStatus.OK)]


async def test_output_that_comes_during_an_append_is_gathered_for_the_next() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.gate.clear()
        bench.say("0-a", (1,), "a")
        await until(lambda: "append" in bench.queue.calls)
        for token_id in (2, 3, 4):
            bench.say("0-a", (token_id,), "b")
        bench.queue.gate.set()
        await bench.publisher.flushed()
        assert [item.delta.token_ids for item in bench.sent] == [(1,), (2, 3, 4)]


class RestsForAnHour(FlushPolicy):
    """As if every append took so long."""

    def rest_s(self, append_s: float) -> float:
        return 3600.0


def test_the_rest_is_as_long_as_the_append_took_and_bounded() -> None:
    policy = FlushPolicy(flush_interval_s=0.025, flush_tokens=8, max_unflushed_tokens=256)
    assert policy.rest_s(0.0004) == 0.0
    assert policy.rest_s(0.010) == 0.010
    assert policy.rest_s(3.0) == 0.025


async def test_while_resting_tokens_wait_for_company_but_firsts_ends_and_many_do_not() -> None:
    policy = RestsForAnHour(flush_interval_s=1, flush_tokens=4, max_unflushed_tokens=256)
    async with running(policy=policy) as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.open(Outbox("0-b", 1, START, ()))
        bench.say("0-a", (1,), "x")
        await until(lambda: len(bench.sent) == 1)
        bench.say("0-a", (2,), "x")
        bench.say("0-b", (1, 2), "xx")  # a first token
        await until(lambda: len(bench.sent) == 2)
        assert bench.sent[1].job_id == "0-b"
        bench.say("0-a", (3, 4, 5), "xxx")  # four wait now
        await until(lambda: len(bench.sent) == 3)
        assert bench.sent[2].delta.token_ids == (2, 3, 4, 5)
        bench.say("0-a", (6,), "x")
        bench.finish("0-b", END)
        await until(lambda: len(bench.sent) == 4)
        assert bench.sent[3].job_id == "0-b"
        assert bench.sent[3].end_of_job == END


async def test_a_store_that_is_away_gets_the_same_append_again_and_then_the_rest() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.away = True
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.num_troubles)
        bench.say("0-a", (2,), "b")
        assert bench.num_troubles
        bench.queue.away = False
        await bench.publisher.flushed()
        assert [item.delta.token_ids for item in bench.sent] == [(1,), (2,)]


async def test_room_closes_at_the_limit_and_opens_when_the_store_is_back() -> None:
    async with running(limit=3) as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.away = True
        bench.say("0-a", (1, 2), "ab")
        assert bench.publisher.has_capacity.is_set()
        bench.say("0-a", (3,), "c")
        assert not bench.publisher.has_capacity.is_set()
        bench.queue.away = False
        await asyncio.wait_for(bench.publisher.has_capacity.wait(), 5)


async def test_dropping_the_job_that_closed_the_room_opens_it() -> None:
    async with running(limit=1) as bench:
        bench.queue.away = True
        bench.open(Outbox("0-a", 1, START, ()))
        bench.say("0-a", (1,), "a")
        assert not bench.publisher.has_capacity.is_set()
        bench.publisher.drop("0-a")
        assert bench.publisher.has_capacity.is_set()
        await asyncio.wait_for(bench.publisher.flushed(), 5)


async def test_a_job_whose_partition_alone_is_away_is_put_off_and_closes_no_room() -> None:
    async with running(limit=2) as bench:
        bench.queue.away = True
        bench.queue.away_alone = {"1-a"}
        bench.open(Outbox("1-a", 3, START, ()))
        bench.say("1-a", (1,), "a")
        assert not bench.put_off
        bench.say("1-a", (2,), "b")
        assert bench.publisher.has_capacity.is_set()
        await asyncio.wait_for(bench.publisher.flushed(), 5)
        assert bench.put_off == [("1-a", 3)]
        assert not bench.settled


async def test_a_full_job_is_put_off_once_its_partition_is_known_to_be_away() -> None:
    async with running(limit=1) as bench:
        bench.queue.away = True
        bench.open(Outbox("1-a", 3, START, ()))
        bench.say("1-a", (1,), "a")
        assert not bench.publisher.has_capacity.is_set()
        bench.queue.away_alone = {"1-a"}
        await asyncio.wait_for(bench.publisher.has_capacity.wait(), 5)
        assert bench.put_off == [("1-a", 3)]


async def test_a_gap_is_filled_from_memory() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.say("0-a", (1,), "a")
        await bench.publisher.flushed()
        bench.say("0-a", (2,), "b")
        await bench.publisher.flushed()
        answers = iter([AppendResult(AppendStatus.GAP, 1, num_bytes=1)])
        bench.queue.answer = lambda item: next(answers, None) or accepted(item)
        bench.say("0-a", (3,), "c")
        await bench.publisher.flushed()
        assert bench.sent[-1].delta.token_ids == (2, 3)
        assert bench.sent[-1].start_hash == chain_hash("", (1,))
        assert bench.num_troubles
        assert not bench.settled


async def test_a_gap_that_memory_cannot_fill_gives_the_job_up() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, ()))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.GAP, 7, num_bytes=7)
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        assert bench.settled == [Settled("0-a", 2, AppendStatus.DIVERGED)]


async def test_a_log_that_answers_gap_for_ever_gives_the_job_up() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.GAP, 0, num_bytes=0)
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        assert bench.settled[0].status is AppendStatus.DIVERGED
        assert len(bench.sent) == 4


@pytest.mark.parametrize(
    "status",
    [AppendStatus.DIVERGED, AppendStatus.FENCED, AppendStatus.GONE, AppendStatus.ENDED],
)
async def test_a_fenced_job_is_settled_and_publishes_no_more(
    status: AppendStatus,
) -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 3, START, ()))
        bench.queue.answer = lambda item: AppendResult(status, detail="d")
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        assert bench.settled == [Settled("0-a", 3, status, "d")]
        assert bool(bench.num_troubles) == (status is not AppendStatus.ENDED)
        await asyncio.wait_for(bench.publisher.flushed(), 5)


async def test_the_verdict_on_one_job_leaves_the_others_alone() -> None:
    async with running() as bench:
        for job_id in ("0-a", "0-b"):
            bench.open(Outbox(job_id, 1, START, ()))
            bench.say(job_id, (1,), "a")
        bench.queue.answer = lambda item: (
            AppendResult(AppendStatus.FENCED) if item.job_id == "0-a" else accepted(item)
        )
        await bench.publisher.flushed()
        bench.say("0-b", (2,), "b")
        await bench.publisher.flushed()
        assert [s.job_id for s in bench.settled] == ["0-a"]
        assert bench.sent[-1].delta.token_ids == (2,)


async def test_a_rejected_append_fails_the_job_loudly() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.answer = lambda item: (
            accepted(item) if item.end_of_job else AppendResult(AppendStatus.REJECTED, detail="why")
        )
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        assert bench.rejected == [("0-a", 1)]
        end = bench.sent[-1].end_of_job
        assert end is not None
        assert (end.state, end.reason) == (JobState.FAILED, "engine_error")
        assert "why" in end.message
        assert bench.settled[0].status is AppendStatus.OK


async def test_a_job_whose_end_is_rejected_too_is_given_up() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.REJECTED, detail="why")
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        assert bench.settled[0].status is AppendStatus.REJECTED


async def test_output_after_a_rejection_is_ignored() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.REJECTED, detail="why")
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.rejected)
        bench.say("0-a", (2,), "b")
        bench.finish("0-a", END)
        await until(lambda: bench.settled)


async def test_output_after_the_job_was_given_up_is_ignored() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.FENCED)
        bench.say("0-a", (1,), "a")
        await until(lambda: bench.settled)
        bench.say("0-a", (2,), "b")
        bench.outboxes["0-a"].cached_tokens = 1
        bench.finish("0-a", END)
        await bench.publisher.flushed()
        assert len(bench.settled) == 1


async def test_an_answer_to_an_older_attempt_does_not_touch_the_newer_one() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.queue.gate.clear()
        bench.queue.answer = lambda item: (
            AppendResult(AppendStatus.FENCED) if item.attempt == 1 else accepted(item)
        )
        bench.say("0-a", (1,), "a")
        await until(lambda: "append" in bench.queue.calls)
        bench.publisher.drop("0-a")
        bench.open(Outbox("0-a", 2, START, ()))
        bench.say("0-a", (5,), "e")
        bench.queue.gate.set()
        await bench.publisher.flushed()
        assert not bench.settled
        assert [(item.attempt, item.delta.token_ids) for item in bench.sent] == [
            (1, (1,)),
            (2, (5,)),
        ]


async def test_the_prefix_hit_comes_with_the_first_tokens() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 1, START, ()))
        bench.outboxes["0-a"].cached_tokens = 48
        bench.say("0-a", (1,), "a")
        await bench.publisher.flushed()
        assert bench.sent[0].cached_tokens == 48


SNAPSHOT = JobSnapshot(b"{}", b"", (), 0.0)


def forgetful(log_end: dict[str, int]) -> Callable[[Append], AppendResult]:
    """A server that has lost every job; after `restore` its log begins anew."""

    def answer(item: Append) -> AppendResult:
        if item.job_id not in log_end:
            return AppendResult(AppendStatus.GONE)
        at = log_end[item.job_id]
        if item.delta.start.num_tokens != at:
            return AppendResult(AppendStatus.GAP, at, num_bytes=at)
        log_end[item.job_id] = item.delta.end.num_tokens
        return accepted(item)

    return answer


async def test_a_lost_job_is_put_back_and_says_everything_again() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        bench.say("0-a", (1, 2), "xy")
        await bench.publisher.flushed()
        log_end: dict[str, int] = {}
        bench.queue.answer = forgetful(log_end)
        bench.queue.on_restore = lambda job_id: log_end.update({job_id: 0})
        bench.say("0-a", (3,), "z")
        bench.finish("0-a", END)
        await until(lambda: bench.settled)
        assert bench.settled == [Settled("0-a", 2, AppendStatus.OK)]
        assert bench.sent[-1].delta.token_ids == (1, 2, 3)
        (put_back,) = bench.queue.restored
        assert put_back[:2] == ("0-a", 2)


async def test_a_lost_job_without_output_is_restored_too() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        bench.publisher.lost("0-a", 1)  # of an older attempt
        bench.publisher.lost("0-a", 2)
        await until(lambda: bench.queue.restored)
        await asyncio.wait_for(bench.publisher.flushed(), 5)
        assert [restored[:2] for restored in bench.queue.restored] == [("0-a", 2)]
        assert (bench.settled, bench.sent) == ([], [])


async def test_a_job_that_may_have_ended_is_not_put_back() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        bench.queue.answer = lambda item: AppendResult(AppendStatus.GONE)
        bench.queue.restore_answers.append(Restored.OVER)
        bench.say("0-a", (1,), "x")
        await until(lambda: bench.settled)
        assert bench.settled == [Settled("0-a", 2, AppendStatus.GONE, "over")]
        await asyncio.wait_for(bench.publisher.flushed(), 5)


async def test_putting_back_waits_for_the_lease_and_for_the_store() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        bench.queue.restore_answers.extend([Restored.NO_LEASE, Restored.NO_LEASE])
        bench.publisher.lost("0-a", 2)
        await until(lambda: len(bench.queue.restored) == 3)
        bench.queue.away = True
        bench.publisher.lost("0-a", 2)
        await until(lambda: bench.num_troubles)
        bench.queue.away = False
        await until(lambda: len(bench.queue.restored) == 4)
        assert not bench.settled


async def test_a_job_that_is_lost_while_another_is_put_back_is_put_back_too() -> None:
    async with running() as bench:
        for job_id in ("0-a", "0-b"):
            bench.open(Outbox(job_id, 1, START, (), snapshot=SNAPSHOT))
        bench.queue.on_restore = lambda job_id: bench.publisher.lost("0-b", 1)
        bench.publisher.lost("0-a", 1)
        await until(lambda: len(bench.queue.restored) == 2)
        assert [restored[0] for restored in bench.queue.restored] == ["0-a", "0-b"]


async def test_a_full_server_that_refuses_one_lost_job_does_not_keep_the_others_waiting() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        bench.open(Outbox("0-b", 1, START, (), snapshot=SNAPSHOT))
        log_end = {"0-b": 0}
        bench.queue.answer = forgetful(log_end)
        bench.queue.restore_answers.extend([Restored.NO_MEMORY, Restored.NO_MEMORY])
        bench.say("0-a", (1,), "x")
        await until(lambda: bench.queue.restored)
        for token_id in range(20):
            bench.say("0-b", (token_id,), "y")
            bench.publisher.lost("0-a", 2)  # as each heartbeat says
            await asyncio.sleep(0.005)
        await until(lambda: log_end["0-b"] == 20)
        assert len(bench.queue.restored) == 1
        log_end["0-a"] = 0
        await until(lambda: log_end["0-a"] == 1)
        assert len(bench.queue.restored) == 3
        assert not bench.settled


async def test_the_last_known_time_of_a_job_is_its_last_good_reply() -> None:
    async with running() as bench:
        bench.open(Outbox("0-a", 2, START, (), snapshot=SNAPSHOT))
        long_ago, lately = time.monotonic() - 1000, time.monotonic() - 500
        bench.publisher._outboxes["0-a"].sure_s = long_ago
        bench.publisher.sure(["0-a", "0-unknown"], lately)
        bench.publisher.lost("0-a", 2)
        await until(lambda: bench.queue.restored)
        assert 500_000 <= bench.queue.restored[0][2] < 600_000
