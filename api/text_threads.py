"""TextThreads: the threads of a TextPool, with a lane for small work.

A Python thread cannot be ended from outside, and `concurrent.futures` waits for its threads when
the interpreter exits. These are daemon threads: a frontend ends while one is still at work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

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
