"""ServerClock: detects steps of the server's clock, by a local clock that is never set.

All deadlines are by the server's clock. When that is set (by hand, by NTP after a wrong start, by a
failover to a host whose clock differs), all of them would pass at once, or an hour late. The server
cannot distinguish its clock's step from time that passed; its clients can: each compares the
movement of the server's clock between two of its calls with that of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Time in which the machine slept counts, if the system has a clock for it.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# Clocks that are right differ by less, also after an outage of hours; no deadline is as exact.
MIN_STEP_MS = 2000


class _Pulse(NamedTuple):
    """One answered call: the server's clock showed `server_ms` between `begun_s` and `ended_s`."""

    number: int
    epoch: str
    server_ms: int
    begun_s: float
    ended_s: float


class ServerClock:
    """One for each process and server, shared by all its calls that pulse (lua/lib/pulse.lua)."""

    def __init__(self, now_s: Callable[[], float] = lambda: time.clock_gettime(_CLOCK)) -> None:
        self.now_s = now_s
        self._base: _Pulse | None = None  # the last one before the server's clock was in doubt
        self.testimony = ""

    def answered(self, begun_s: float, reply: Any) -> bool:
        """Takes the reply of the script's `pulse` to a call that was sent at `begun_s`.

        True while the server's time stands still: `testimony`, sent with the next call, ends that.
        """
        number, server_ms, stands_still = (int(value) for value in reply[:3])
        seen = _Pulse(number, reply[3].decode(), server_ms, begun_s, self.now_s())
        if not stands_still:
            self._base, self.testimony = seen, ""
        elif self._base is not None:  # otherwise this process started after the clock was in doubt
            step_ms = _step_ms(self._base, seen)
            self.testimony = f"{self._base.epoch}:{number}:{step_ms}"
        return bool(stands_still)


def _step_ms(first: _Pulse, second: _Pulse) -> int:
    """Returns the least milliseconds by which the server's clock was set between two calls."""
    moved_ms = second.server_ms - first.server_ms
    at_least = moved_ms - (second.ended_s - first.begun_s) * 1000
    at_most = moved_ms - (second.begun_s - first.ended_s) * 1000
    step_ms = round(max(at_least, 0.0) or min(at_most, 0.0))
    return step_ms if abs(step_ms) > MIN_STEP_MS else 0
