"""EventBus over Redis pub/sub: frames are an accelerator, the log is the truth."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from shared.keys import Keys
from shared.messages import JobEvent
from shared.redis.pubsub import NotConfirmed, Subscriber
from shared.transport.ports.jobs import RESYNC, Resync, Subscription, TransportError
from shared.transport.wire import decode_frame

log = logging.getLogger(__name__)

QUEUE_FRAMES = 64


class RedisSubscription:
    """One reader's bounded queue of live events.

    Whenever something may be missing (a confirmation, an overflow, a frame that cannot be read) all
    that waits is replaced by one RESYNC: the log has it.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self._events: deque[JobEvent] = deque()
        self._resync = False
        self._waiting = ReusableTimer()

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        if not self._resync and not self._events:
            await self._waiting.wait(timeout_s)
        if self._resync:
            self._resync = False
            return RESYNC
        return self._events.popleft() if self._events else None

    @property
    def num_waiting(self) -> int:
        return len(self._events)

    def wake(self) -> None:
        self._waiting.wake()

    def close(self) -> None:
        """Ends the waits for good; releases the timer."""
        self._waiting.close()

    def on_confirmed(self) -> None:
        self._events.clear()
        self._resync = True
        self._waiting.wake()

    def on_message(self, data: bytes) -> None:
        try:
            event = decode_frame(data)
        except (ValueError, TypeError):
            log.warning("received an unreadable pub/sub frame", extra={"job_id": self.job_id})
            self.on_confirmed()
            return
        if event is None:
            return
        if len(self._events) >= QUEUE_FRAMES:
            self.on_confirmed()
            return
        self._events.append(event)
        self._waiting.wake()


class RedisEventBus:
    """Implements EventBus. Several subscriptions of one job in a process share its channel."""

    def __init__(self, keys: Keys, subscriber: Subscriber) -> None:
        self._keys = keys
        self._subscriber = subscriber

    async def start(self) -> None:
        """Begins to connect; retries until there is a connection."""
        self._subscriber.start()

    async def aclose(self) -> None:
        await self._subscriber.aclose()

    @property
    def reconnects(self) -> int:
        """The number of lost connections so far."""
        return self._subscriber.reconnects

    async def subscribe(self, job_id: str) -> Subscription:
        subscription = await self.begin(job_id)
        await self.confirmed(subscription)
        return subscription

    async def begin(self, job_id: str) -> Subscription:
        subscription = RedisSubscription(job_id)
        await self._subscriber.add(self._keys.channel(job_id), subscription)
        return subscription

    async def confirmed(self, subscription: Subscription) -> None:
        assert isinstance(subscription, RedisSubscription)
        try:
            await self._subscriber.confirmed(self._keys.channel(subscription.job_id), subscription)
        except NotConfirmed as error:
            raise TransportError(str(error)) from error

    async def unsubscribe(self, subscription: Subscription) -> None:
        assert isinstance(subscription, RedisSubscription)
        subscription.close()
        await self._subscriber.remove(self._keys.channel(subscription.job_id), subscription)


class ReusableTimer:
    """A wait with a time limit that is rarely reached, many times in a row.

    A timer for each wait costs more than the wait where events come every few milliseconds. Here
    one timer runs on, and checks when it fires whether the current wait is over. One task waits at
    a time; any task on its loop may wake it.
    """

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._ends_s = 0.0  # of the wait, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._fires_s = 0.0

    async def wait(self, timeout_s: float) -> None:
        """Waits for the next `wake`, at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        self._ends_s = loop.time() + timeout_s
        if self._timer is None or self._fires_s > self._ends_s:
            self._set(loop)
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Ends the current wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Cancels the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._fires_s = self._ends_s
        self._timer = loop.call_at(self._fires_s, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets it again
        if self._ends_s > self._fires_s:
            self._set(loop)
        else:
            self.wake()
