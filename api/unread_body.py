"""UnreadBody: what a body may cost on the wire, and how long one may go on after its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LINGER_S = 5.0  # for the rest of a body whose request has its answer already
MAX_FRAMING_BYTES = 64 * 1024  # chunk sizes, their extensions and trailers, beside ...
FRAMING_FACTOR = 8  # ... this many for each byte of the body: chunks of one byte have five


class UnreadBody:
    """One connection's. `late` is called when an answered request's body has not ended in time.

    A request that is refused early (too large, too late) has an answer before its body ends. What
    still comes is read and dropped for a while, so that the client gets to its answer; a body that
    goes on longer would otherwise go on for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self.is_coming = False
        self._loop = loop
        self._late = late
        self._wire_bytes = 0
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        """The head is complete: whatever comes now is body or framing."""
        self.is_coming = True
        self._wire_bytes = self._body_bytes = 0

    def came(self, wire_bytes: int = 0, body_bytes: int = 0) -> None:
        self._wire_bytes += wire_bytes
        self._body_bytes += body_bytes

    def ends(self) -> None:
        self.is_coming = False
        self._stop()

    def answered(self) -> None:
        """The request has its whole answer."""
        if self.is_coming and self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._late)

    def is_mostly_framing(self) -> bool:
        """More has come around the body than any honest client sends."""
        allowed = MAX_FRAMING_BYTES + FRAMING_FACTOR * self._body_bytes
        return self.is_coming and self._wire_bytes - self._body_bytes > allowed

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
