"""Outages: a loop that retries is logged when it begins to fail and when it succeeds again.

A process tries many things of the store at a time, and loses all of them in the same moment.
RateLimitedOutageLog makes two lines of one loop's outage; OutageFold, in the handler of a process's
log, makes two lines of all loops' outage of one thing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

REMIND_S = 30.0
SETTLED_S = 2.0  # without a failure, after which an outage is over
STORE = "the store"  # what most loops need

# Attributes of records that the fold reads; no field of a line.
OUTAGE_OF = "outage_of"  # the unavailable part
OUTAGE_OVER = "outage_over"  # this loop's is over; the number of failed tries
OUTAGE_ONCE = "outage_once"  # of something that is not tried again
OUTAGE_ATTRIBUTES = frozenset({OUTAGE_OF, OUTAGE_OVER, OUTAGE_ONCE})

# For `extra` of a single try: it has no line while loops fail for the same reason.
OF_STORE_OUTAGE: dict[str, object] = {OUTAGE_OF: STORE, OUTAGE_ONCE: True}

log = logging.getLogger(__name__)


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
            self._log.warning(self._failing, extra={**fields, **lasting, **self._mark})

    def succeeded(self) -> None:
        """Ends the outage, if there is one, with a line that has its length."""
        # Looked at first: this is called for every message that is received.
        if self._outage.since_s is None:
            return
        num_failures = self._outage.num_failures
        if (outage_s := self._outage.succeeded()) is not None:
            over = {OUTAGE_OVER: num_failures} if self._of else {}
            extra = {"outage_s": round(outage_s, 1), **self._mark, **over}
            self._log.info(self._recovered, extra=extra)

    @property
    def _mark(self) -> dict[str, object]:
        return {OUTAGE_OF: self._of} if self._of else {}


class OutageFold(logging.Filter):
    """Lets one line pass when something goes away, and logs one when it is back.

    The first record of an outage passes, whichever loop it is from, then one every REMIND_S. The
    outage is over at the first success that no failure follows within SETTLED_S; the line of it is
    so much later. A loop that still fails then begins another one with its next record, and so does
    the next one after loops that have ended without success.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, _Folded] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record passes. Called by the thread that logs it."""
        of = getattr(record, OUTAGE_OF, None)
        if of is None or record.levelno <= logging.DEBUG:
            return True
        with self._lock:
            num_failures = getattr(record, OUTAGE_OVER, None)
            if num_failures is None:
                return self._failed(of, record, is_loops=not hasattr(record, OUTAGE_ONCE))
            self._succeeded(of, num_failures)
            return False

    def close(self) -> None:
        """Logs the ends that would be logged in a moment."""
        for of in list(self._running):
            self._end(of)

    def _failed(self, of: str, record: logging.LogRecord, *, is_loops: bool) -> bool:
        now_s = self._clock()
        folded = self._running.get(of)
        if folded is None or now_s - folded.failed_s > 2 * REMIND_S:
            if is_loops:
                self._running[of] = _Folded(now_s, record.getMessage())
            return True
        folded.failed_s, folded.num_failures = now_s, folded.num_failures + 1
        folded.answered_s = None  # what answered before was no end
        folded.stop_timer()
        if now_s - folded.shown_s < REMIND_S:
            return False
        folded.shown_s, folded.num_shown = now_s, folded.num_shown + 1
        return True

    def _succeeded(self, of: str, num_failures: int) -> None:
        folded = self._running.get(of)
        if folded is None:
            return  # a loop that noticed it late
        folded.num_failures += num_failures - 1  # its first one was counted as it was logged
        if folded.answered_s is None:
            folded.answered_s = self._clock()
            folded.timer = threading.Timer(SETTLED_S, self._end, (of,))
            folded.timer.daemon = True
            folded.timer.start()

    def _end(self, of: str) -> None:
        with self._lock:
            folded = self._running.get(of)
            if folded is None or folded.answered_s is None:
                return
            folded.stop_timer()
            del self._running[of]
            outage_s = folded.answered_s - folded.since_s
        num_suppressed = max(0, folded.num_failures - folded.num_shown)
        log.info(
            "%s answers again",
            of,
            extra={
                "outage_s": round(outage_s, 1),
                "began_with": folded.failing,
                "num_suppressed": num_suppressed,
            },
        )


class _Folded:
    """An outage of one thing that several loops need."""

    def __init__(self, now_s: float, failing: str) -> None:
        self.failing = failing
        self.since_s = self.shown_s = self.failed_s = now_s
        self.num_failures = 1
        self.num_shown = 1
        self.answered_s: float | None = None  # the first success since the last failure
        self.timer: threading.Timer | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
