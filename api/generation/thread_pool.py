"""TextPool: bounded threads for what would hold up the event loop: JSON, templates, tokenizing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from api.errors import overloaded, unavailable
from shared.text.base import RenderingUnavailable

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
        """Returns how many calls wait or run."""
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
        """Drops waiting calls. Threads end after their current call and are not waited for."""
        self._text_threads.close()

    @property
    def _num_taken(self) -> int:
        return self._small.num + self._large.num


# TextThreads: the threads of a TextPool, with a lane for small work.
#
# A Python thread cannot be ended from outside, and `concurrent.futures` waits for its threads when
# the interpreter exits. These are daemon threads: a frontend ends while one is still at work.

SMALL_BYTES = 64 * 1024  # of a request; its text takes some ten milliseconds


class TextThreads:
    """`num_threads` threads and two lanes, each in the order of arrival.

    With two threads or more, the first of them takes small work only: it never waits for large
    work. The others take large work first, so that small work cannot starve it.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._small: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._large: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._num_started = 0
        self._num_busy = 0
        self._is_closed = False

    @property
    def num_busy(self) -> int:
        """Threads that are at work now."""
        return self._num_busy

    def submit(self, num_bytes: int, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queues `work`; `num_bytes` (of the request that it is for) choose the lane.

        Raises RuntimeError after `close`.
        """
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args)
            except BaseException as error:  # a panic of native code is not an Exception
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._changed:
            if self._is_closed:
                raise RuntimeError("the text threads are closed")
            (self._small if num_bytes <= SMALL_BYTES else self._large).append((run, future))
            self._start()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Cancels waiting work. Threads end after what they are at; nothing waits for them."""
        with self._changed:
            self._is_closed = True
            dropped = [*self._small, *self._large]
            self._small.clear()
            self._large.clear()
            self._changed.notify_all()
        for _, future in dropped:
            future.cancel()

    def _start(self) -> None:
        """Starts all threads with the first work."""
        while self._num_started < self._num_threads:
            takes_large = self._num_started > 0 or self._num_threads == 1
            self._num_started += 1
            name = f"text-{self._num_started}"
            threading.Thread(
                target=self._serve, args=(takes_large,), name=name, daemon=True
            ).start()

    def _serve(self, takes_large: bool) -> None:
        while (run := self._next(takes_large)) is not None:
            try:
                run()
            finally:
                del run  # its arguments, a prompt perhaps, are not kept until the next work
                with self._changed:
                    self._num_busy -= 1

    def _next(self, takes_large: bool) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                lanes = (self._large, self._small) if takes_large else (self._small,)
                for lane in lanes:
                    if lane:
                        self._num_busy += 1
                        return lane.popleft()[0]
                self._changed.wait()
            return None
