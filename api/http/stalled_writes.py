"""StalledWrites: a client that stopped reading does not keep its place for ever.

What it does not read fills its buffers and then ours, and its answer waits for room. Nobody hears
of such a client: TCP keeps the connection as long as the other side's kernel answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 8  # in one limit


class StalledWrites:
    """Of one connection. While it watches, `on_stall` is called once nothing was taken for
    `limit_s` seconds (0: never), at most an eighth later."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.WriteTransport,
        limit_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self._taken_s = 0.0

    def watch(self) -> None:
        """From now on: there is something that the client has not taken. Idempotent."""
        if self._timer is None and self._limit_s > 0:
            self._num_bytes = self._transport.get_write_buffer_size()
            self._taken_s = self._loop.time()
            self._look_later()

    def rest(self) -> None:
        """The client takes what there is. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        before, self._num_bytes = self._num_bytes, self._transport.get_write_buffer_size()
        if not self._num_bytes:
            return
        now_s = self._loop.time()
        if self._num_bytes < before:
            self._taken_s = now_s
        if now_s - self._taken_s >= self._limit_s:
            self._on_stall()
        else:
            self._look_later()
