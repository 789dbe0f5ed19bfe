"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_AFTER_S = 0.05


async def stop_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels until every task has ended; their results and exceptions are dropped.

    For tasks that have nothing to await when they are cancelled: a repeated cancel would end that.

    One cancel is not enough: up to Python 3.11 `asyncio.wait_for`, which the Redis client uses to
    send, forgets a cancel that arrives when what it waits for has just finished.
    """
    running = set(tasks)
    while running := {task for task in running if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=AGAIN_AFTER_S)
    await asyncio.gather(*tasks, return_exceptions=True)
