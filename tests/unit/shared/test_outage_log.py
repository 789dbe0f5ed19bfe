"""An outage is logged when it begins, now and then while it lasts, and when it is over."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from shared.logs import SETTLED_S, OutageFold
from shared.outages import OF_STORE_OUTAGE, OUTAGE, REMIND_S, STORE, RateLimitedOutageLog


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_outage_of_minutes_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = RateLimitedOutageLog(
        logging.getLogger("t"), failing="gone", recovered="here", clock=clock
    )
    outage.succeeded()  # nothing was away: nothing to say
    for _ in range(65):
        outage.failed(error="refused")
        clock.now_s += 1
    outage.succeeded()
    outage.succeeded()
    output = [(r.levelname, r.getMessage(), getattr(r, "outage_s", None)) for r in caplog.records]
    assert output == [
        ("WARNING", "gone", None),
        ("WARNING", "gone", REMIND_S),
        ("WARNING", "gone", 2 * REMIND_S),
        ("WARNING", "here", 65.0),
    ]
    assert caplog.records[0].error == "refused"  # type: ignore[attr-defined]


def test_the_next_outage_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = RateLimitedOutageLog(
        logging.getLogger("t"), failing="gone", recovered="here", clock=clock
    )
    for _ in range(2):
        outage.failed()
        outage.succeeded()
    assert [record.getMessage() for record in caplog.records] == ["gone", "here"] * 2


class Loops:
    """Loops of one process that need the store, and what passes their fold."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *names: str) -> None:
        self.clock = Clock()
        self.fold = OutageFold(self.clock)
        self.filter = self.fold.passes
        caplog.set_level(logging.INFO)
        caplog.handler.addFilter(self.filter)
        self.logger = logging.getLogger("t")
        self._caplog = caplog
        self.by_name = {
            name: RateLimitedOutageLog(
                self.logger,
                failing=f"{name} fails",
                recovered=f"{name} works",
                of=STORE,
                clock=self.clock,
            )
            for name in names
        }

    def fail(self, *names: str) -> None:
        for name in names or self.by_name:
            self.by_name[name].failed()

    def work(self, *names: str) -> None:
        for name in names or self.by_name:
            self.by_name[name].succeeded()

    def settle(self, seconds: float = SETTLED_S) -> None:
        """Lets time pass, and writes what the log's thread then writes."""
        self.clock.now_s += seconds
        for record in self.fold.ended():
            self.logger.handle(record)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def loops(caplog: pytest.LogCaptureFixture) -> Iterator[Loops]:
    made = Loops(caplog, "heartbeat", "queue", "log")
    yield made
    caplog.handler.removeFilter(made.filter)


def ended(caplog: pytest.LogCaptureFixture) -> list[tuple[float, int]]:
    """The lengths of outages that are over, and how much was not logged of each."""
    return [
        (record.outage_s, record.num_suppressed)  # type: ignore[attr-defined]
        for record in caplog.records
        if record.getMessage() == "the store answers again"
    ]


def test_an_outage_of_all_loops_is_one_line_when_it_begins_and_one_when_it_is_over(
    loops: Loops, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        loops.fail()
        loops.clock.now_s += 1
    loops.work("queue")
    loops.clock.now_s += 0.5
    loops.work()
    loops.settle()
    assert loops.lines == ["heartbeat fails", "the store answers again"]
    assert ended(caplog) == [(10.0, 29)]


def test_a_success_among_failures_is_no_end(loops: Loops, caplog: pytest.LogCaptureFixture) -> None:
    loops.fail()
    loops.clock.now_s += 3
    loops.work("queue")
    loops.clock.now_s += 1
    loops.fail("queue")  # it is away still: one answer came through
    loops.clock.now_s += 1
    loops.work()
    loops.settle()
    assert loops.lines == ["heartbeat fails", "the store answers again"]
    assert ended(caplog) == [(5.0, 3)]


def test_an_end_is_logged_once_and_when_nothing_has_failed_for_a_while(loops: Loops) -> None:
    loops.fail()
    loops.work()
    assert loops.fold.is_settling
    loops.settle(SETTLED_S / 2)
    assert loops.lines == ["heartbeat fails"]
    loops.settle(SETTLED_S / 2)
    loops.settle()
    assert not loops.fold.is_settling
    loops.fail("log")
    assert loops.lines == ["heartbeat fails", "the store answers again", "log fails"]


def test_a_long_outage_is_reminded_of_by_one_loop_at_a_time(loops: Loops) -> None:
    for _ in range(65):
        loops.fail()
        loops.clock.now_s += 1
    assert len(loops.lines) == 3


def test_a_single_failed_try_is_logged_if_no_loop_fails(loops: Loops) -> None:
    loops.logger.warning("failed to submit a job", extra=OF_STORE_OUTAGE)
    loops.fail("queue")
    loops.logger.warning("submit failed again", extra=OF_STORE_OUTAGE)
    loops.logger.warning("another matter")
    assert loops.lines == ["failed to submit a job", "queue fails", "another matter"]


def test_a_loop_that_ended_in_an_outage_hides_no_later_one(loops: Loops) -> None:
    loops.fail("queue")
    loops.clock.now_s += 10 * REMIND_S
    loops.fail("log")
    assert loops.lines == ["queue fails", "log fails"]


def test_a_librarys_field_of_the_same_name_is_no_mark() -> None:
    record = logging.makeLogRecord({"msg": "theirs", "levelno": logging.WARNING, OUTAGE: "theirs"})
    assert OutageFold().passes(record)
