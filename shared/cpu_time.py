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
