"""TextPool: bounded threads for what would hold up the event loop: JSON, templates, tokenizing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from api.errors import overloaded

Result = TypeVar("Result")

RETRY_AFTER_S = 1.0
MIN_BYTES = 4096  # counted of the smallest request: it has an open connection and a task
MAX_WAIT_S = 30.0  # that work waits for a thread

# Bytes of the request that the running task answers; 0: of none, or of one without a body.
request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)


class TextPool:
    """At most `threads` at work. What waits is bounded in bytes (`max_waiting_bytes` of requests)
    and in time (MAX_WAIT_S); more is refused. One request may always wait, however large."""

    def __init__(self, threads: int, max_waiting_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._threads = threads
        self._max_waiting_bytes = max_waiting_bytes
        self._num_taken = 0
        self._num_bytes = 0  # of what waits and what is at work

    def __len__(self) -> int:
        """How much work waits or is at work."""
        return self._num_taken

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Raises UnavailableError (503) when too much waits or no thread is free in time, and
        whatever `work` raises."""
        num_bytes = max(MIN_BYTES, request_bytes.get())
        is_full = self._num_bytes + num_bytes > self._max_waiting_bytes
        if is_full and self._num_taken > self._threads:
            raise overloaded("Too many prompts are being read at once.", RETRY_AFTER_S)
        self._num_taken += 1
        self._num_bytes += num_bytes
        begun = self._executor.submit(work, *args)
        future = asyncio.wrap_future(begun)

        def given_back(done: asyncio.Future[Any]) -> None:
            self._num_taken -= 1
            self._num_bytes -= num_bytes
            if not done.cancelled():
                done.exception()  # its caller has it; one that left does not want it

        # Counted until the thread is free again, also when the caller has left meanwhile.
        future.add_done_callback(given_back)
        done, _ = await asyncio.wait([future], timeout=MAX_WAIT_S)
        if not done and begun.cancel():  # False: a thread is at it
            raise overloaded("No thread was free in time to read this prompt.", RETRY_AFTER_S)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Waiting work is dropped; threads end after what they are at."""
        self._executor.shutdown(wait=False, cancel_futures=True)
