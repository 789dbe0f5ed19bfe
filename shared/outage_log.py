"""OutageLog: what is tried again and again is said once when it goes, and once when it comes back.

A loop that logs each of its attempts fills a disk while the store is away, and buries the line that
says since when. A loop that logs the first alone looks dead after an hour.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

REMIND_S = 30.0


class OutageLog:
    """One for each thing that can be away. Messages are constant, as everywhere."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        away: str,
        back: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._away = away
        self._back = back
        self._clock = clock
        self._since_s: float | None = None
        self._said_s = 0.0

    def failed(self, **fields: object) -> None:
        """An attempt failed: a warning at the first one, then at most every REMIND_S."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = self._said_s = now_s
            self._log.warning(self._away, extra=fields)
        elif now_s - self._said_s >= REMIND_S:
            self._said_s = now_s
            away_s = round(now_s - self._since_s, 1)
            self._log.warning(self._away, extra={**fields, "away_s": away_s})

    def works(self) -> None:
        """An attempt succeeded. Says how long it took, where there was an outage."""
        if self._since_s is not None:
            away_s = round(self._clock() - self._since_s, 1)
            self._since_s = None
            self._log.info(self._back, extra={"away_s": away_s})
