"""TextPool: bounded threads for what would hold up the event loop: JSON, templates, tokenizing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from api.errors import overloaded

Result = TypeVar("Result")

RETRY_AFTER_S = 1.0


class TextPool:
    """At most `threads` at work and `max_waiting` waiting; more are refused, not queued."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._limit = threads + max_waiting
        self._num_taken = 0

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Raises UnavailableError (503) when too many wait, and whatever `work` raises."""
        if self._num_taken >= self._limit:
            raise overloaded("Too many prompts are being read at once.", RETRY_AFTER_S)
        self._num_taken += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        # Counted until the thread is free again, also when the caller has left meanwhile.
        future.add_done_callback(self._given_back)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Waiting work is dropped; threads end after what they are at."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _given_back(self, future: asyncio.Future[Any]) -> None:
        self._num_taken -= 1
        if not future.cancelled():
            future.exception()  # its caller has it; one that left does not want it
