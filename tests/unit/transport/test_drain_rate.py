"""DrainRate: what a refused caller is told."""

from __future__ import annotations

from shared.transport.drain_rate import DrainRate


def test_the_wait_is_the_queue_over_the_measured_rate_spread_by_a_fifth() -> None:
    rate = DrainRate()
    rate.observe(100, 0.0)
    rate.observe(150, 10.0)  # five a second
    waits = [rate.retry_after_s(100) for _ in range(50)]
    assert all(20.0 <= wait <= 24.0 for wait in waits)
    assert len(set(waits)) > 1


def test_the_wait_stays_within_its_bounds() -> None:
    rate = DrainRate()
    assert 1.0 <= rate.retry_after_s(5) <= 60.0
    rate.observe(0, 0.0)
    rate.observe(0, 10.0)
    assert rate.retry_after_s(5) == 60.0
    rate.observe(10**6, 20.0)
    assert 1.0 <= rate.retry_after_s(1) <= 1.2


def test_old_samples_and_lost_counters_are_forgotten() -> None:
    rate = DrainRate()
    rate.observe(0, 0.0)
    rate.observe(1000, 40.0)
    rate.observe(1010, 50.0)
    assert 10.0 <= rate.retry_after_s(10) <= 12.0
    rate.observe(0, 60.0)
    rate.observe(10, 70.0)
    assert 10.0 <= rate.retry_after_s(10) <= 12.0
