"""StandingOrder: what an operator ordered this worker to do, which holds until the next order."""

from __future__ import annotations

import asyncio
import logging

from shared.transport.ports.registry import Order
from worker.running_jobs import RunningJobs

LOOK_S = 1.0  # between looks at the order and the table of jobs

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
        if order is Order.SERVE:
            self.may_take.set()
        else:
            self.may_take.clear()

    async def exit_ordered(self) -> None:
        """Returns once the worker is ordered to exit and runs no job. However long they take: no
        timeout hands them back."""
        while self.order is not Order.EXIT or len(self._jobs):
            await asyncio.sleep(LOOK_S)
