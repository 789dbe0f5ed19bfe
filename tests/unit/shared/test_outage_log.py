"""An outage is logged when it begins, now and then while it lasts, and when it is over."""

from __future__ import annotations

import logging

import pytest

from shared.logs import REMIND_S, RateLimitedOutageLog


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
        ("INFO", "here", 65.0),
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
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "gone",
        "gone",
    ]
