"""Waiting for something to become true, with a deadline and no fixed sleeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.02
PATIENCE_S = 60.0  # no scenario is about speed: this only ends one that has gone wrong


async def until(
    condition: Callable[[], Any | Awaitable[Any]], what: str, timeout_s: float = PATIENCE_S
) -> Any:
    """The condition's first true value. An assertion that fails in it counts as not yet."""
    deadline_s = time.monotonic() + timeout_s
    reason = ""
    while True:
        try:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
        except AssertionError as error:
            reason = f": {error}"
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}{reason}")
        await asyncio.sleep(POLL_S)
