"""When a worker reports which prefixes its cache holds, and what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue
from worker import prefix_report
from worker.prefix_report import MAX_DIGESTS, PrefixReport
from worker.runtime import held_prefixes
from worker.runtime.held_prefixes import HeldPrefixes


class Bench:
    def __init__(self) -> None:
        self.queue = FakeQueue()
        self.held = HeldPrefixes()
        self.report = PrefixReport(self.queue, "w1", 5000, self.held)

    def change(self, held: str = "", lost: str = "") -> None:
        changes = [(name.encode(), True) for name in held]
        self.held.change([*changes, *((name.encode(), False) for name in lost)])

    async def noted(self, names: str) -> None:
        await until(lambda: self.queue.noted == {name.encode() for name in names})


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    for name in ("INTERVAL_S", "RETRY_S"):
        monkeypatch.setattr(prefix_report, name, 0.001)
    made = Bench()
    running = asyncio.create_task(made.report.run())
    yield made
    running.cancel()


async def test_a_worker_that_is_alone_reports_nothing(bench: Bench) -> None:
    bench.report.heard(1, 0)
    bench.change("ab")
    await asyncio.sleep(0.02)
    assert bench.queue.calls == []


async def test_when_another_worker_comes_all_is_reported_and_then_what_changes(
    bench: Bench,
) -> None:
    bench.change("abc")
    bench.report.heard(2, 0)
    await bench.noted("abc")
    bench.change("d", lost="a")
    await bench.noted("bcd")
    assert bench.queue.prefixes == [([b"a", b"b", b"c"], [], True), ([b"d"], [b"a"], False)]


async def test_what_redis_has_lost_is_reported_again(bench: Bench) -> None:
    bench.report.heard(2, 0)
    bench.change("ab")
    await bench.noted("ab")
    bench.report.heard(2, 2)
    bench.queue.noted.clear()
    bench.report.heard(2, 0)
    await bench.noted("ab")


async def test_a_report_that_fails_is_made_again_whole(bench: Bench) -> None:
    bench.report.heard(2, 0)
    bench.change("a")
    await bench.noted("a")
    bench.queue.away = True
    bench.change("b")
    await until(lambda: bench.queue.calls.count("note_prefixes") > 2)
    bench.queue.away = False
    await bench.noted("ab")


async def test_when_the_engine_is_gone_nothing_is_held(bench: Bench) -> None:
    bench.report.heard(2, 0)
    bench.change("ab")
    await bench.noted("ab")
    bench.held.clear()
    await bench.noted("")
    bench.change("c")
    await bench.noted("c")


async def test_one_report_is_bounded(bench: Bench) -> None:
    digests = [number.to_bytes(8, "big") for number in range(2 * MAX_DIGESTS + 1)]
    bench.held.change((digest, True) for digest in digests)
    bench.report.heard(2, 0)
    await until(lambda: bench.queue.noted == {*digests})
    sizes = [len(held) for held, _, _ in bench.queue.prefixes]
    assert sizes == [MAX_DIGESTS, MAX_DIGESTS, 1]


async def test_of_too_many_prefixes_the_oldest_are_not_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_prefixes, "MAX_PREFIXES", 3)
    bench.report.heard(2, 0)
    bench.change("abc")
    await bench.noted("abc")
    bench.change("ad")
    await bench.noted("acd")
