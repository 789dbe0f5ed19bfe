"""TextPool: bounded threads for what would hold up the event loop: JSON, templates, tokenizing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from api.errors import overloaded, unavailable
from api.text_threads import SMALL_BYTES, TextThreads
from shared.text.errors import RenderingUnavailable

log = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_AFTER_S = 1.0
MIN_BYTES = 4096  # counted of the smallest request: it has an open connection and a task
MAX_WAIT_S = 30.0  # that work waits for a thread

# Bytes of the request that the running task answers; 0: of none, or of one without a body.
request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)


@dataclass(slots=True)
class _Taken:
    """What waits and what is at work in one lane of the threads."""

    num: int = 0
    num_bytes: int = 0


class TextPool:
    """At most `threads` at work. What waits is bounded in bytes (`max_waiting_bytes` of requests in
    each lane) and in time (MAX_WAIT_S); more is refused. One request may always wait, however
    large.

    Small requests have a lane and a thread apart (TextThreads): they neither wait for large ones
    nor are refused because of them.
    """

    def __init__(self, threads: int, max_waiting_bytes: int) -> None:
        self._text_threads = TextThreads(threads)
        self._threads = threads
        self._max_waiting_bytes = max_waiting_bytes
        self._small, self._large = _Taken(), _Taken()

    def __len__(self) -> int:
        """How much work waits or is at work."""
        return self._num_taken

    @property
    def num_busy(self) -> int:
        """Threads that are at work now, also for callers that have left."""
        return self._text_threads.num_busy

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Raises UnavailableError (503) when too much waits, no thread is free in time or no
        process can render a chat template, and whatever else `work` raises."""
        num_bytes = max(MIN_BYTES, request_bytes.get())
        lane = self._small if num_bytes <= SMALL_BYTES else self._large
        is_full = lane.num_bytes + num_bytes > self._max_waiting_bytes
        if is_full and lane.num > self._threads:
            raise overloaded("Too many prompts are being read at once.", RETRY_AFTER_S)
        lane.num += 1
        lane.num_bytes += num_bytes
        begun = self._text_threads.submit(num_bytes, work, *args)
        future = asyncio.wrap_future(begun)

        def given_back(done: asyncio.Future[Any]) -> None:
            lane.num -= 1
            lane.num_bytes -= num_bytes
            if not done.cancelled():
                done.exception()  # its caller has it; one that left does not want it

        # Counted until the thread is free again, also when the caller has left meanwhile.
        future.add_done_callback(given_back)
        done, _ = await asyncio.wait([future], timeout=MAX_WAIT_S)
        if not done and begun.cancel():  # False: a thread is at it
            raise overloaded("No thread was free in time to read this prompt.", RETRY_AFTER_S)
        try:
            return await asyncio.shield(future)
        except RenderingUnavailable as error:
            log.error("chat template not rendered", extra={"reason": str(error)})
            message = "The prompt could not be rendered now. Try again soon."
            raise unavailable(message, RETRY_AFTER_S) from None

    def close(self) -> None:
        """Waiting work is dropped. Threads end after what they are at, and are not waited for."""
        self._text_threads.close()

    @property
    def _num_taken(self) -> int:
        return self._small.num + self._large.num
