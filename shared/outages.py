"""Outages: a loop that retries is logged when it begins to fail and when it succeeds again.

A process tries many things of the store at a time, and loses all of them in the same moment.
RateLimitedOutageLog makes two lines of one loop's outage; shared.logs.OutageFold, in the thread
that writes a process's log, makes two lines of all loops' outage of one thing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

REMIND_S = 30.0
STORE = "the store"  # what most loops need
OUTAGE = "outage"  # the attribute of a record that the fold reads; no field of a line


class OutageMark(NamedTuple):
    """The part of a record about an outage that several loops share."""

    of: str  # the unavailable part
    num_failed: int | None = None  # this loop's outage is over; the number of failed tries
    is_loop: bool = True  # it is tried again


# For `extra` of a single try: it has no line while loops fail for the same reason.
OF_STORE_OUTAGE: dict[str, object] = {OUTAGE: OutageMark(STORE, is_loop=False)}


class Outage:
    """Decides which failures of something that is tried again and again are reported.

    A loop that reports each of its tries fills a disk while the server is away, and buries the line
    that has the start. A loop that reports the first one alone looks dead after an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since_s: float | None = None  # None while the tries succeed
        self.num_failures = 0  # of this outage
        self._reported_s = 0.0

    def failed(self) -> float | None:
        """Counts a failure. Returns the outage's age in seconds where it is to be reported: at its
        first failure (0.0), then at most every REMIND_S; None otherwise."""
        now_s = self._clock()
        self.num_failures += 1
        if self.since_s is None:
            self.since_s = self._reported_s = now_s
            return 0.0
        if now_s - self._reported_s < REMIND_S:
            return None
        self._reported_s = now_s
        return now_s - self.since_s

    def succeeded(self) -> float | None:
        """Ends the outage. Returns how many seconds it lasted; None without one."""
        if self.since_s is None:
            return None
        lasted_s, self.since_s = self._clock() - self.since_s, None
        self.num_failures = 0
        return lasted_s


class RateLimitedOutageLog:
    """Logs an outage when it begins, every REMIND_S while it lasts, and when it is over."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        failing: str,
        recovered: str,
        of: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failing` and `recovered` are the constant messages of the two records. `of`: the part
        that is unavailable then, for other loops of the process, too."""
        self._log = log
        self._failing = failing
        self._recovered = recovered
        self._of = of
        self._outage = Outage(clock)

    def failed(self, **fields: object) -> None:
        """Counts a failed try; logs a warning with `fields` where one is due."""
        outage_s = self._outage.failed()
        if outage_s is not None:
            lasting = {"outage_s": round(outage_s, 1)} if outage_s else {}
            self._log.warning(self._failing, extra={**fields, **lasting, **self._mark()})

    def succeeded(self) -> None:
        """Ends the outage, if there is one, with a line that has its length."""
        # Looked at first: this is called for every message that is received.
        if self._outage.since_s is None:
            return
        num_failed = self._outage.num_failures
        if (outage_s := self._outage.succeeded()) is not None:
            extra = {"outage_s": round(outage_s, 1), **self._mark(num_failed)}
            # As loud as its beginning: who reads warnings alone would wait for the end.
            self._log.warning(self._recovered, extra=extra)

    def _mark(self, num_failed: int | None = None) -> dict[str, object]:
        return {OUTAGE: OutageMark(self._of, num_failed)} if self._of else {}
