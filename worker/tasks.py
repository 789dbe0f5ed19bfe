"""Background tasks that certainly end: wait for the first one, cancel until they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

CANCEL_AGAIN_S = 0.25


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Returns when all have ended; somebody else looks at their outcome.

    Asks more than once: up to Python 3.11 `asyncio.wait_for`, which the Redis client awaits in
    every command, loses a cancellation that comes in the moment its inner task is done.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def first_of(*things: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Returns when one is done or the time is over. What was not a task before is cancelled."""
    futures = [asyncio.ensure_future(thing) for thing in things]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for thing, future in zip(things, futures, strict=True):
            if thing is not future:
                future.cancel()
