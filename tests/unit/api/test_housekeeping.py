"""A frontend that stood still: its readers attach before it looks for orphans."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from api.housekeeping import Housekeeping, _repeat
from api.jobs.disconnects import ATTACH_ROUNDS, DisconnectTracker
from shared.messages import JobState, OnDisconnect
from shared.transport.ports.jobs import TransportError


class FakeStore:
    """Notes what is called; the lease is there, or has ended, as told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.attached: list[str] = []  # reader ids
        self.has_lease = False
        self.is_away = False

    async def frontend_heartbeat(self, frontend_id: str, lease_ms: int) -> bool:
        self.calls.append("heartbeat")
        had, self.has_lease = self.has_lease, True
        return had

    async def attach(self, readers: Sequence[tuple[str, str]]) -> Sequence[JobState | None]:
        if self.is_away:
            raise TransportError("away")
        self.calls.append("attach")
        self.attached += [reader_id for _, reader_id in readers]
        return [JobState.QUEUED] * len(readers)

    async def reap(self) -> int:
        self.calls.append("reap")
        return 0


def watched(store: FakeStore, count: int) -> DisconnectTracker:
    disconnects = DisconnectTracker(store)  # type: ignore[arg-type]
    for number in range(count):
        disconnects.watch(f"0-{number}", f"fe#{number}", OnDisconnect.CANCEL)
    return disconnects


def housekeeping_of(store: FakeStore, disconnects: DisconnectTracker) -> Housekeeping:
    others: Any = None  # of no use to heartbeats
    return Housekeeping(
        store,  # type: ignore[arg-type]
        disconnects,
        *(others, others, others, others, others, others),
        frontend_id="fe",
        lease_ms=10_000,
        health_interval_s=1.0,
    )


async def test_after_a_late_heartbeat_all_readers_attach_before_the_frontend_reaps() -> None:
    store = FakeStore()
    housekeeping = housekeeping_of(store, watched(store, 6))
    await housekeeping._reap()
    assert store.calls == ["heartbeat", "reap"]  # the first heartbeat is not late
    store.calls.clear()
    store.has_lease = False  # it stood still for longer than its lease
    await asyncio.gather(housekeeping._heartbeat(), housekeeping._reap())
    assert store.calls == ["heartbeat", "heartbeat", "attach", "reap"]
    assert sorted(store.attached) == [f"fe#{number}" for number in range(6)]
    store.calls.clear()
    await housekeeping._reap()
    assert store.calls == ["heartbeat", "reap"]


async def test_a_frontend_whose_readers_could_not_attach_does_not_reap() -> None:
    store = FakeStore()
    housekeeping = housekeeping_of(store, watched(store, 2))
    await housekeeping._reap()
    store.has_lease, store.is_away = False, True
    for _ in range(2):  # its lease runs again at the second
        with pytest.raises(TransportError):
            await housekeeping._reap()
    assert store.calls.count("reap") == 1
    store.is_away = False
    await housekeeping._reap()
    assert store.calls[-2:] == ["attach", "reap"]


async def test_each_reader_attaches_once_in_a_turn_of_rounds_and_the_work_is_spread() -> None:
    store = FakeStore()
    disconnects = DisconnectTracker(store)  # type: ignore[arg-type]
    numbers = itertools.count()
    for _ in range(ATTACH_ROUNDS):  # they come over time
        for number in itertools.islice(numbers, 5):
            disconnects.watch(f"0-{number}", f"fe#{number}", OnDisconnect.CANCEL)
        await disconnects.attach_some()
    disconnects.watch("0-x", "fe#x", OnDisconnect.CONTINUE)
    store.attached.clear()
    sizes = []
    for _ in range(ATTACH_ROUNDS):
        before = len(store.attached)
        await disconnects.attach_some()
        sizes.append(len(store.attached) - before)
    assert sizes == [5] * ATTACH_ROUNDS
    assert sorted(store.attached) == sorted(f"fe#{number}" for number in range(20))
    disconnects.unwatch("fe#3")
    store.attached.clear()
    await disconnects.attach_all()
    assert len(store.attached) == 19


async def test_after_a_round_that_failed_all_readers_attach() -> None:
    store = FakeStore()
    disconnects = watched(store, 8)
    store.is_away = True
    while True:
        try:
            await disconnects.attach_some()
        except TransportError:
            break
    store.is_away = False
    await disconnects.attach_some()
    assert len(store.attached) == 8


class FailsThenWorks:
    """Fails `num_failures` times with `error`, then succeeds."""

    def __init__(self, error: Exception, num_failures: int) -> None:
        self.error = error
        self.num_failures = num_failures
        self.num_calls = 0

    async def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error


async def rounds_of(work: FailsThenWorks, num_rounds: int) -> None:
    task = asyncio.create_task(_repeat("reap", 0.0, work))
    try:
        async with asyncio.timeout(5):
            while work.num_calls < num_rounds:
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("error", [TransportError("away"), TimeoutError()])
async def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "api.housekeeping")
    await rounds_of(FailsThenWorks(error, 3), 6)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "housekeeping fails: reap"),
        ("WARNING", "housekeeping succeeds again: reap"),
    ]
    assert caplog.records[1].outage_s >= 0  # type: ignore[attr-defined]


async def test_an_unexpected_error_is_logged_with_its_traceback_and_the_rounds_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "api.housekeeping")
    await rounds_of(FailsThenWorks(KeyError("x"), 2), 4)
    assert [record.levelname for record in caplog.records] == [
        "ERROR",
        "WARNING",
        "ERROR",
        "WARNING",
    ]
    assert all(record.exc_info for record in caplog.records if record.levelname == "ERROR")
