"""What a process testifies of the server's clock, and that it testifies nothing uncertain."""

from __future__ import annotations

from itertools import count

import pytest

from shared.redis.server_clock import MIN_STEP_MS, ServerClock

HOUR_MS = 3_600_000


class Calls:
    """Calls of one process to a server whose clock is `offset_ms` from its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.offset_ms = 1_700_000_000_000.0
        self.clock = ServerClock(lambda: self.now_s)
        self._numbers = count(1)

    def call(self, *, stands_still: bool = False, there_s: float = 0.0, back_s: float = 0.0) -> str:
        """One that takes so long to the server and back. The testimony after it."""
        begun_s = self.now_s
        self.now_s += there_s
        server_ms = int(self.now_s * 1000 + self.offset_ms)
        self.now_s += back_s
        reply = [next(self._numbers), str(server_ms).encode(), int(stands_still), b"1-7"]
        self.clock.answered(begun_s, reply)
        return self.clock.testimony

    def step_ms(self, testimony: str) -> int:
        return int(testimony.split(":")[2])


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, 10 * MIN_STEP_MS])
def test_a_step_is_testified_between_the_calls_that_saw_it(step_ms: int) -> None:
    calls = Calls()
    assert calls.call() == ""
    calls.now_s += 1
    assert calls.call() == ""
    calls.now_s += 1
    calls.offset_ms += step_ms
    assert calls.call(stands_still=True) == f"1-7:3:{step_ms}"
    calls.now_s += 1
    # Nobody took it: the next says the same of a longer time.
    assert calls.call(stands_still=True) == f"1-7:4:{step_ms}"
    calls.now_s += 1
    assert calls.call() == ""
    assert calls.clock.testimony == ""


@pytest.mark.parametrize("passed_s", [0.0, 30.0, 100_000.0])
def test_time_that_passed_is_no_step(passed_s: float) -> None:
    calls = Calls()
    calls.call()
    calls.now_s += passed_s
    assert calls.step_ms(calls.call(stands_still=True)) == 0


@pytest.mark.parametrize(("there_s", "back_s"), [(600.0, 0.0), (0.0, 600.0), (300.0, 300.0)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_that_was_long_on_its_way_is_no_step(
    there_s: float, back_s: float, is_first: bool
) -> None:
    """The process or the server was frozen meanwhile."""
    calls = Calls()
    calls.call(there_s=there_s if is_first else 0.0, back_s=back_s if is_first else 0.0)
    calls.now_s += 1
    testimony = calls.call(
        stands_still=True,
        there_s=0.0 if is_first else there_s,
        back_s=0.0 if is_first else back_s,
    )
    assert calls.step_ms(testimony) == 0


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_of_a_step_during_a_long_call_what_is_certain_is_testified(step_ms: int) -> None:
    calls = Calls()
    calls.call()
    calls.offset_ms += step_ms
    testified_ms = calls.step_ms(calls.call(stands_still=True, there_s=60.0, back_s=60.0))
    assert testified_ms * step_ms > 0
    assert abs(step_ms) - 120_000 <= abs(testified_ms) <= abs(step_ms)


def test_a_process_without_an_earlier_call_testifies_nothing() -> None:
    calls = Calls()
    assert calls.call(stands_still=True) == ""
    calls.now_s += 1
    assert calls.call(stands_still=True) == ""  # its first was not before the doubt either


def test_clocks_that_run_at_slightly_different_rates_make_no_step() -> None:
    calls = Calls()
    calls.call()
    calls.now_s += 3600
    calls.offset_ms += 700  # 200 parts in a million over an hour without an answer
    assert calls.step_ms(calls.call(stands_still=True)) == 0
