"""Waits grow with each failure up to a bound, and are short again after a success."""

from __future__ import annotations

import asyncio

import pytest

from shared.backoff import Backoff


def test_waits_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.05, 1.0)
    assert [backoff.next_s() for _ in range(7)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1])
    backoff.reset()
    assert backoff.num_failures == 0
    assert backoff.next_s() == pytest.approx(0.05)


def test_the_factor_and_the_number_of_failures_can_be_given() -> None:
    backoff = Backoff(0.1, 10.0, factor=5.0)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4)] == pytest.approx([0.1, 0.5, 2.5, 10.0])


def test_an_outage_of_any_length_overflows_nothing() -> None:
    assert Backoff(0.05, 1.0).delay_s(10**9) == 1.0


def test_jitter_takes_a_part_of_each_wait() -> None:
    waits = [Backoff(1.0, 1.0, jitter=0.5).next_s() for _ in range(200)]
    assert 0.5 <= min(waits) < max(waits) <= 1.0


def test_no_first_wait_is_no_wait_at_all() -> None:
    backoff = Backoff(0.0, 0.0)
    assert [backoff.next_s() for _ in range(3)] == [0.0, 0.0, 0.0]


async def test_waiting_counts_the_failure_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    backoff = Backoff(2.0, 60.0)
    await backoff.wait()
    await backoff.wait()
    assert slept == [2.0, 4.0]
    assert backoff.num_failures == 2
