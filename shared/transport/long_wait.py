"""LongWait: waiting with a time limit that is rarely reached, again and again.

A timer for each wait costs more than the wait when something comes every few milliseconds. Here
one timer is left running, and when it rings it looks whether the wait of that moment is over.
"""

from __future__ import annotations

import asyncio


class LongWait:
    """One task waits at a time; anybody on its loop may wake it."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._ends_s = 0.0  # of the wait, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0

    async def wait(self, timeout_s: float) -> None:
        """Until the next `wake`, or until `timeout_s` is over."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        self._ends_s = loop.time() + timeout_s
        if self._timer is None or self._rings_s > self._ends_s:
            self._set(loop)
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Ends the wait of this moment, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Lets go of the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._rings_s = self._ends_s
        self._timer = loop.call_at(self._rings_s, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets it anew
        if self._ends_s > self._rings_s:
            self._set(loop)
        else:
            self.wake()
