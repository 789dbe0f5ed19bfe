"""Waiting for something to become true, with a deadline and no fixed sleeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

FIRST_POLL_S = 0.001
POLL_S = 0.02  # between polls of what takes long
PATIENCE_S = 60.0  # no test is about speed: this only ends one that has gone wrong


async def until(
    condition: Callable[[], Any | Awaitable[Any]],
    what: str = "the condition",
    timeout_s: float = PATIENCE_S,
) -> Any:
    """Returns the condition's first true value. An assertion that fails in it counts as not yet."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
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
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, POLL_S)


def wait_until(
    condition: Callable[[], Any], what: str = "the condition", timeout_s: float = PATIENCE_S
) -> Any:
    """Returns the condition's first true value, polled by this thread.

    What it polls is often an HTTP request: it polls less often the longer it takes.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.005
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
    return value
