"""TextPool: a bounded thread pool for JSON, templates and tokenizing, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from api.errors import overloaded, unavailable
from api.http.shares import SHARE, Pot, payer, paying_tenant
from shared.cpu_time import work_cpu_s
from shared.tasks import cancel_and_wait
from shared.text.base import RenderingUnavailable

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Charge = Callable[[str, float], None]  # of a tenant

RETRY_AFTER_S = 1.0
MIN_BYTES = 4096  # counted of the smallest request: it has an open connection and a task
MAX_WAIT_S = 30.0  # that work waits for a thread
WATCH_AFTER_S = 0.1  # of waiting, from when a client that has gone is noticed

# Bytes of the request that the running task answers; 0: of none, or of one without a body.
request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)
# Returns when the client of the running task has gone; None: no client waits for an answer.
client_gone: ContextVar[Callable[[], Coroutine[Any, Any, None]] | None] = ContextVar(
    "client_gone", default=None
)


class TextPool:
    """At most `threads` at work, by turns of the tenants. What waits is bounded in bytes
    (`max_waiting_bytes` of requests in each lane, of a tenant its `share`) and in time
    (MAX_WAIT_S); more is refused. One request may always wait, however large. Work that waits for a
    client that has gone is dropped.

    Small requests have a lane and a thread apart (TextThreads): they neither wait for large ones
    nor are refused because of them. A tenant has at most its `share` of the threads, too.
    """

    def __init__(
        self,
        threads: int,
        max_waiting_bytes: int,
        share: float = SHARE,
        charge: Charge | None = None,
    ) -> None:
        """`charge` is called with the tenant and the processor seconds of the work."""
        self._text_threads = TextThreads(threads, charge, share)
        self._threads = threads
        self.small, self.large = (
            Pot(
                f"{lane}_text_bytes",
                max_waiting_bytes,
                share,
                what="waiting prompts",
                full="Too many prompts are being read at once.",
                retry_after_s=RETRY_AFTER_S,
                always=threads + 1,
            )
            for lane in ("small", "large")
        )

    def __len__(self) -> int:
        """Returns how many calls wait or run."""
        return self.small.num_takers + self.large.num_takers

    @property
    def num_busy(self) -> int:
        """Threads that are at work now, also for callers that have left."""
        return self._text_threads.num_busy

    @property
    def has_waiting(self) -> bool:
        """Whether more work is there than threads."""
        return len(self) > self._threads

    def charge(self, cpu_s_of: Mapping[str, float]) -> None:
        """Delays the next turns of tenants by the seconds that they used in other processes."""
        self._text_threads.charge(cpu_s_of)

    def check(self, num_bytes: int) -> None:
        """Checks whether a request of `num_bytes` may wait now, before they are read. Raises
        UnavailableError as `run`."""
        num_bytes = max(MIN_BYTES, num_bytes)
        self._lane(num_bytes).check(num_bytes, payer.get())

    def _lane(self, num_bytes: int) -> Pot:
        return self.small if num_bytes <= SMALL_BYTES else self.large

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Raises UnavailableError when too much waits (503; 429 where it is the tenant's), no
        thread is free in time or no process can render a chat template (503), ClientDisconnect
        when the client leaves meanwhile, and whatever else `work` raises."""
        num_bytes = max(MIN_BYTES, request_bytes.get())
        charge = self._lane(num_bytes).take(num_bytes)
        run = copy_context().run  # the work has the payer in its context
        task = self._text_threads.submit(paying_tenant(), num_bytes, run, work, *args)
        future = asyncio.wrap_future(task.future)

        def given_back(done: asyncio.Future[Any]) -> None:
            charge.give()
            if not done.cancelled():
                done.exception()  # its caller has it; one that left does not want it

        # Counted until the thread is free again, also when the caller has left meanwhile.
        future.add_done_callback(given_back)
        try:
            await self._wait(task, future)
            return await asyncio.shield(future)
        except RenderingUnavailable as error:
            log.error("failed to render a chat template", extra={"reason": str(error)})
            message = "The prompt could not be rendered now. Try again soon."
            raise unavailable(message, RETRY_AFTER_S) from None
        finally:
            if not future.done():
                self._text_threads.drop(task)

    async def _wait(self, task: TextTask, future: asyncio.Future[Any]) -> None:
        """Returns when the work is done. Raises UnavailableError and ClientDisconnect."""
        done, _ = await asyncio.wait([future], timeout=min(WATCH_AFTER_S, MAX_WAIT_S))
        if done:
            return
        awaited: set[asyncio.Future[Any]] = {future}
        gone = client_gone.get()
        leaving = None if gone is None else asyncio.create_task(gone())
        if leaving is not None:
            awaited.add(leaving)
        try:
            left_s: float | None = max(0.0, MAX_WAIT_S - WATCH_AFTER_S)
            while not future.done():
                await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if future.done():
                    return
                if leaving is not None and leaving.done():
                    leaving.result()  # ApiError: its key was revoked
                    raise ClientDisconnect
                if left_s is not None and self._text_threads.drop(task):
                    raise overloaded(
                        "No thread was free in time to read this prompt.", RETRY_AFTER_S
                    )
                left_s = None  # a thread is at it
        finally:
            if leaving is not None:
                await cancel_and_wait(leaving)

    def close(self) -> None:
        """Drops waiting calls. Threads end after their current call and are not waited for."""
        self._text_threads.close()


# TextThreads: the threads of a TextPool, with a lane for small work.
#
# A Python thread cannot be ended from outside, and `concurrent.futures` waits for its threads when
# the interpreter exits. These are daemon threads: a frontend ends while one is still at work.

SMALL_BYTES = 64 * 1024  # of a request; its text takes some ten milliseconds
MAX_IDLE_ACCOUNTS = 1024
MAX_AHEAD_S = 5.0  # of the others' work that a tenant waits for, however much it has used


@dataclass(eq=False, slots=True)
class TextTask:
    """Work that waits or runs, and the lane that it is in."""

    run: Callable[[], None]
    future: Future[Any]
    of: str
    is_small: bool
    begun_s: float = 0.0  # 0: it waits


@dataclass(eq=False, slots=True)
class _Account:
    """One tenant's work, and the processor seconds that it has used."""

    used_s: float
    small: deque[TextTask] = field(default_factory=deque)
    large: deque[TextTask] = field(default_factory=deque)
    running: set[TextTask] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        return not (self.small or self.large or self.running)

    def num_running(self, *, is_small: bool) -> int:
        return sum(task.is_small is is_small for task in self.running)

    def due_s(self, now_s: float) -> float:
        """Returns the seconds used. Running work counts by the clock until it has ended."""
        return self.used_s + sum(now_s - task.begun_s for task in self.running)


class TextThreads:
    """`num_threads` threads and two lanes for each tenant, each in the order of arrival.

    The tenant that has used the least processor time has the next turn (start-time fair queueing:
    one that comes anew starts beside the one served last). Time is measured, not estimated: work
    that fails, is refused later or is read by no one counts as any other, and so does what the
    tenant used in other processes (`charge`), up to MAX_AHEAD_S.

    With two threads or more, the first of them takes small work only: it never waits for large
    work. The others take a tenant's large work first, so that small work cannot starve it.

    A tenant ("": the server's own work, or no keys) has at most its `share` of each lane, of
    the threads at work, and at least one: one that sends small work alone leaves a thread to the
    others, and the processors have room for the event loop.
    """

    def __init__(self, num_threads: int, charge: Charge | None, share: float = SHARE) -> None:
        self._num_threads = num_threads
        self._max_of_tenant = max(1, math.floor(share * num_threads))
        self._charge = charge
        self._accounts: dict[str, _Account] = {}
        self._served_s = 0.0  # what the tenant whose turn came last had used
        self._changed = threading.Condition()
        self._num_started = 0
        self._num_busy = 0
        self._is_closed = False

    @property
    def num_busy(self) -> int:
        """Threads that are at work now."""
        return self._num_busy

    def submit(self, of: str, num_bytes: int, work: Callable[..., Any], *args: Any) -> TextTask:
        """Queues `work` of the tenant `of`; `num_bytes` (of the request) choose the lane.

        Raises RuntimeError after `close`.
        """
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = work(*args)
            except BaseException as error:  # a panic of native code is not an Exception
                future.set_exception(error)
            else:
                future.set_result(result)

        task = TextTask(run, future, of, num_bytes <= SMALL_BYTES)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the text threads are closed")
            account = self._account(of)
            (account.small if task.is_small else account.large).append(task)
            self._start()
            self._changed.notify_all()
        return task

    def charge(self, cpu_s_of: Mapping[str, float]) -> None:
        """Counts seconds that tenants used in other processes."""
        with self._changed:
            if self._is_closed:
                return
            for of, cpu_s in cpu_s_of.items():
                account = self._account(of)
                most_s = max(account.used_s, self._served_s + MAX_AHEAD_S)
                account.used_s = min(account.used_s + cpu_s, most_s)
            self._forget_idle()

    def drop(self, task: TextTask) -> bool:
        """Cancels work that waits; returns False where a thread is at it or it has been."""
        with self._changed:
            account = self._accounts.get(task.of)
            lane = None if account is None else account.small if task.is_small else account.large
            if task.begun_s or lane is None or task not in lane:
                return False
            lane.remove(task)
        task.future.cancel()
        return True

    def close(self) -> None:
        """Cancels waiting work. Threads end after their current work; nothing waits for them."""
        with self._changed:
            self._is_closed = True
            accounts = list(self._accounts.values())
            dropped = [task for of in accounts for task in (*of.small, *of.large)]
            self._accounts.clear()
            self._changed.notify_all()
        for task in dropped:
            task.future.cancel()

    def _account(self, of: str) -> _Account:
        """Returns a tenant's account; an idle one has used no less than the tenant served last."""
        account = self._accounts.setdefault(of, _Account(self._served_s))
        if account.is_idle:
            account.used_s = max(account.used_s, self._served_s)
        return account

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
        while (task := self._next(takes_large)) is not None:
            begun_s = work_cpu_s()
            try:
                task.run()
            finally:
                cpu_s = work_cpu_s() - begun_s
                if self._charge is not None:
                    self._charge(task.of, cpu_s)
                with self._changed:
                    self._num_busy -= 1
                    self._end(task, cpu_s)
                    self._changed.notify_all()  # more of its tenant may begin, on any thread
                del task  # its arguments, a prompt perhaps, are not kept until the next work

    def _next(self, takes_large: bool) -> TextTask | None:
        with self._changed:
            while not self._is_closed:
                task = self._turn(takes_large)
                # False: it was cancelled a moment ago.
                if task is not None and task.future.set_running_or_notify_cancel():
                    task.begun_s = time.monotonic()
                    self._accounts[task.of].running.add(task)
                    self._num_busy += 1
                    return task
                if task is None:
                    self._changed.wait()
            return None

    def _turn(self, takes_large: bool) -> TextTask | None:
        """Takes the next work of the tenant that has used the least."""
        now_s = time.monotonic()
        waiting = [
            (account, lane)
            for of, account in self._accounts.items()
            if (lane := self._lane(of, account, takes_large))
        ]
        if not waiting:
            return None
        account, lane = min(waiting, key=lambda one: one[0].due_s(now_s))
        self._served_s = max(self._served_s, account.used_s)
        return lane.popleft()

    def _lane(self, of: str, account: _Account, takes_large: bool) -> deque[TextTask] | None:
        """Returns the lane of which a tenant's next work may begin; None without one."""
        limit = self._max_of_tenant if of else self._num_threads
        if takes_large and account.large and account.num_running(is_small=False) < limit:
            return account.large
        if account.small and account.num_running(is_small=True) < limit:
            return account.small
        return None

    def _end(self, task: TextTask, cpu_s: float) -> None:
        account = self._accounts.get(task.of)
        if account is None:  # closed
            return
        account.running.discard(task)
        account.used_s += cpu_s
        self._forget_idle()

    def _forget_idle(self) -> None:
        idle = [of for of, one in self._accounts.items() if one.is_idle]
        # Those that are ahead are remembered: else many short visits would be free.
        for of in idle:
            if len(idle) > MAX_IDLE_ACCOUNTS or self._accounts[of].used_s <= self._served_s:
                del self._accounts[of]
