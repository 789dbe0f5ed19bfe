"""DrainRate: what a refused caller gets."""

from __future__ import annotations

import pytest

from shared.transport.drain_rate import DrainRate, DrainRates


def measured(*looks: tuple[float, float], is_waiting: bool = True) -> DrainRate:
    rate = DrainRate()
    for now_s, total in looks:
        rate.observe({"w": total}, now_s, is_waiting=is_waiting)
    return rate


def test_the_wait_is_the_work_over_the_measured_rate_spread_by_a_fifth() -> None:
    rate = measured((0.0, 1000), (10.0, 1500))  # fifty a second
    waits = [rate.retry_after_s(1000) for _ in range(50)]
    assert all(20.0 <= wait <= 24.0 for wait in waits)
    assert len(set(waits)) > 1


def test_the_wait_stays_within_its_bounds() -> None:
    assert 2.0 <= DrainRate().retry_after_s(10**9) <= 2.4  # nothing is known
    assert measured((0.0, 7), (10.0, 7)).retry_after_s(5) == 60.0  # nothing is done
    assert measured((0.0, 0), (10.0, 1)).retry_after_s(10**9) == 60.0
    assert 1.0 <= measured((0.0, 0), (10.0, 10**6)).retry_after_s(1) <= 1.2


def test_a_short_measurement_gives_no_rate() -> None:
    assert measured((0.0, 0), (1.0, 500)).tokens_per_s is None
    assert measured((0.0, 0), (1.0, 500), (2.0, 1000)).tokens_per_s == 500.0


def test_time_in_which_nothing_waited_does_not_count() -> None:
    assert measured((0.0, 0), (10.0, 500), is_waiting=False).tokens_per_s is None
    rate = DrainRate()
    for now_s, total, is_waiting in (
        (0.0, 0, False),  # half idle
        (10.0, 20, True),
        (14.0, 2020, True),
        (20.0, 2030, False),
    ):
        rate.observe({"w": total}, now_s, is_waiting=is_waiting)
    assert rate.tokens_per_s == 500.0


def test_old_looks_are_forgotten() -> None:
    rate = measured((0.0, 0), (10.0, 100_000), (35.0, 100_000), (45.0, 101_000))
    assert rate.tokens_per_s == pytest.approx(1000 / 35)


def test_workers_that_come_go_or_count_anew_add_what_they_do_from_then_on() -> None:
    rate = DrainRate()
    for now_s, totals in (
        (0.0, {"a": 100.0, "b": 9000.0}),
        (4.0, {"a": 500.0, "c": 7000.0}),  # b is gone, c is new
        (8.0, {"a": 20.0, "c": 7400.0}),  # a's engine is another
    ):
        rate.observe(totals, now_s, is_waiting=True)
    assert rate.tokens_per_s == 100.0


def test_without_a_worker_the_wait_is_the_longest_and_no_rate_is_known() -> None:
    rates = DrainRates()
    assert rates.of("m").retry_after_s(10) <= 2.4  # before the first look
    rates.observe({"m": {"w": 0.0}}, {"m"}, 0.0)
    rates.observe({"m": {"w": 1000.0}}, {"m"}, 10.0)
    assert rates.of("m").tokens_per_s == 100.0
    rates.observe({}, set(), 11.0)  # its only worker has gone
    assert rates.of("m").tokens_per_s is None
    assert rates.of("m").retry_after_s(10) == 60.0
