"""StandingOrder: what an operator ordered this worker to do, which holds until the next order."""

from __future__ import annotations

import asyncio
import logging

from shared.tasks import first_of
from shared.transport.ports.registry import Order
from worker.running_jobs import RunningJobs

LOOK_S = 1.0  # between looks at the table of jobs, beside its event

log = logging.getLogger(__name__)

_SENTENCES = {
    Order.SERVE: "an operator ordered the worker to serve again",
    Order.DRAIN: "draining: an operator ordered the worker to take no new jobs",
    Order.EXIT: "draining: an operator ordered the worker to take no new jobs, and to exit",
}


class StandingOrder:
    """The order of the last heartbeat's reply that had one. Redis may forget it meanwhile."""

    def __init__(self, worker_id: str, jobs: RunningJobs) -> None:
        self.order = Order.SERVE
        self.may_take = asyncio.Event()  # jobs from the queue
        self.may_take.set()
        self._worker_id = worker_id
        self._jobs = jobs
        self._must_exit = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self.order is not Order.SERVE

    def receive(self, order: Order | None) -> None:
        """Follows `order` from now on; None: the last one holds."""
        if order is None or order is self.order:
            return
        self.order = order
        extra = {"worker_id": self._worker_id, "num_jobs": len(self._jobs)}
        log.info(_SENTENCES[order], extra=extra)
        for event, is_set in (
            (self.may_take, order is Order.SERVE),
            (self._must_exit, order is Order.EXIT),
        ):
            event.set() if is_set else event.clear()

    async def exit_ordered(self) -> None:
        """Returns once the worker is ordered to exit and runs no job. However long they take: no
        timeout hands them back."""
        while True:
            await self._must_exit.wait()
            self._jobs.changed.clear()
            if not len(self._jobs):
                return
            await first_of(self._jobs.changed.wait(), timeout_s=LOOK_S)
