"""EventBus: live events of jobs, at most once. Whatever it loses is read from the job's log."""

from __future__ import annotations

from typing import Protocol

from shared.messages import (
    JobEvent,
)


class Subscription(Protocol):
    """Live events of one job for one reader. At most once: gaps are the reader's to fill.

    Every confirmation of the subscription by the server (first or after a reconnect) is delivered
    as RESYNC: the reader must then read the log from its cursor.
    """

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        """The next event; RESYNC; or None when nothing came within `timeout_s`.

        A subscription's queue is bounded: what does not fit is dropped, RESYNC comes instead.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Events that `get` would give at once."""
        ...

    def wake(self) -> None:
        """Ends the wait of a `get`, which returns None if there is nothing to give."""
        ...


class Resync:
    """Sentinel class: catch up from the log now."""


RESYNC = Resync()


class EventBus(Protocol):
    """At-most-once fan-out of a job's events; one multiplexed connection per process."""

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    async def subscribe(self, job_id: str) -> Subscription:
        """Returns once the server confirmed, or raises TransportError. First get() is RESYNC."""
        ...

    async def begin(self, job_id: str) -> Subscription:
        """As `subscribe`, without the wait: `confirmed` comes before the first get()."""
        ...

    async def confirmed(self, subscription: Subscription) -> None:
        """Returns once the server confirmed what `begin` gave. Raises TransportError, and ends the
        subscription then."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None: ...
