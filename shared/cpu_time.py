"""Processor time of a thread's work, also where other threads and processes do a part of it."""

from __future__ import annotations

import threading
import time


class _Elsewhere(threading.local):
    seconds = 0.0


_elsewhere = _Elsewhere()


def work_cpu_s() -> float:
    """Returns the processor seconds of this thread, and of others on its behalf, so far."""
    return time.thread_time() + _elsewhere.seconds


def add_cpu_s(seconds: float) -> None:
    """Counts processor time that another thread or process spent on this thread's behalf."""
    _elsewhere.seconds += seconds


class TenantSeconds:
    """Processor seconds by tenant. Safe on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, tenant: str, seconds: float) -> None:
        with self._lock:
            self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Returns the seconds added since the last call, by tenant."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds
