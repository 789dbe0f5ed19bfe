"""StopSign: that a batch is to stop before its last row, and why."""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum


class Stop(StrEnum):
    """Why: somebody cancelled it, or its time is over."""

    CANCEL = "cancel"
    EXPIRE = "expire"


class StopSign:
    """Seen by all rows of a batch. Once set, it stays as it was set first."""

    def __init__(self) -> None:
        self.why: Stop | None = None
        self._event = asyncio.Event()

    def set(self, why: Stop) -> None:
        self.why = self.why or why
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is set, after at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self.why is not None
