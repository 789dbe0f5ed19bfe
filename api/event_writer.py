"""EventWriter: events and keep-alives of one stream as messages of its ASGI response."""

from __future__ import annotations

import time

from starlette.types import Send

from api import sse


class EventWriter:
    """Every write is whole events. One that is cut while it waits has written nothing.

    A keep-alive is a write of its own. What has to follow it (see `sse.Framing`) leads the next
    write.
    """

    def __init__(self, keepalive: bytes, behind_keepalive: bytes) -> None:
        self.has_begun = False
        self._keepalive = keepalive
        self._behind_keepalive = behind_keepalive
        self._lead = b""  # of the next events that are written
        self._written_s = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the last write, or since this was made."""
        return time.monotonic() - self._written_s

    async def begin(self, send: Send) -> None:
        """Sends status and headers."""
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})

    async def keep_alive(self, send: Send) -> None:
        """Writes a keep-alive."""
        self._written_s = time.monotonic()
        await send({"type": "http.response.body", "body": self._keepalive, "more_body": True})
        self._lead = self._behind_keepalive

    async def write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        """Writes whole events, or none; with `more=False` the last ones."""
        if events:
            self._written_s = time.monotonic()
            events = self._lead + events
        await send({"type": "http.response.body", "body": events, "more_body": more})
        if events:
            self._lead = b""

    def follow_id(self) -> None:
        """An event with an `id:` has been written: a blank line behind a comment would be an empty
        event to some clients from now on."""
        self._keepalive, self._behind_keepalive = sse.KEEPALIVE_AFTER_ID, b""
