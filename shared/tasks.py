"""Background tasks that certainly end: cancel them until they are gone, wait for the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

CANCEL_AGAIN_S = 0.25


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels `tasks` until every one has ended; never raises their errors.

    Their exceptions are not retrieved here: one that no caller retrieves is logged by asyncio.

    For tasks that await no clean-up longer than CANCEL_AGAIN_S: the next cancel would end that.

    One cancel may not be enough: up to Python 3.11 `asyncio.wait_for`, which libraries use, loses a
    cancel that arrives when the awaited object has just finished.
    """
    running = set(tasks)
    while running := {task for task in running if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


async def first_of(*awaitables: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Waits until one of `awaitables` is done, at most `timeout_s`.

    Tasks and futures among the others run on; coroutines among them are cancelled.
    """
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for awaitable, future in zip(awaitables, futures, strict=True):
            if awaitable is not future:
                future.cancel()
