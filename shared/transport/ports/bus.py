"""EventBus: live events of jobs, at most once. Whatever it loses is read from the job's log."""

from __future__ import annotations

from typing import Protocol

from shared.messages import (
    JobEvent,
)


class Subscription(Protocol):
    """Live events of one job for one reader. At most once: the reader fills gaps.

    Every confirmation of the subscription by the server (first or after a reconnect) is delivered
    as RESYNC: the reader must then read the log from its cursor.
    """

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        """Returns the next event; RESYNC; or None when nothing came within `timeout_s`. One task at
        a time.

        A subscription's queue is bounded: events that do not fit are replaced by RESYNC.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """The number of events that `get` would return at once."""
        ...

    def wake(self) -> None:
        """Ends the wait of a `get`, which returns None if there is no event."""
        ...


class Resync:
    """Sentinel class: catch up from the log now."""


RESYNC = Resync()


class EventBus(Protocol):
    """At-most-once fan-out of a job's events; one multiplexed connection per process."""

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    async def subscribe(self, job_id: str) -> Subscription:
        """Returns once the server confirmed; the first get() is RESYNC. Raises TransportError."""
        ...

    async def begin(self, job_id: str) -> Subscription:
        """Subscribes without the wait; await `confirmed` before the first get()."""
        ...

    async def confirmed(self, subscription: Subscription) -> None:
        """Waits until the server confirms a subscription of `begin`. Ends the subscription if it
        raises TransportError."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None: ...
