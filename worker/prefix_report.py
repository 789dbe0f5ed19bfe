"""PrefixReport: reports to Redis which prefixes this worker's cache holds, as that changes.

Jobs go first to the worker that holds the longest part of their prefix (docs/adr/0030). A worker
that is alone reports nothing.
"""

from __future__ import annotations

import asyncio
import logging

from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import JobQueue
from worker.runtime.held_prefixes import HeldPrefixes

INTERVAL_S = 0.05  # between reports: as often as the engine reports to the service
RETRY_S = 1.0
MAX_DIGESTS = 1024  # in one report: Redis notes them in about a millisecond

log = logging.getLogger(__name__)


class PrefixReport:
    """Sends the changes of `held` while other workers are registered."""

    def __init__(self, queue: JobQueue, worker_id: str, lease_ms: int, held: HeldPrefixes) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._held = held
        self._has_others = asyncio.Event()

    def heard(self, num_workers: int, num_noted: int) -> None:
        """Takes from a heartbeat's reply how many workers there are, and how many prefixes of this
        one are noted."""
        if num_workers < 2:
            self._has_others.clear()
            return
        if not self._has_others.is_set() or (num_noted == 0 and self._held.num_noted):
            self._held.start_over()
        self._has_others.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._has_others.wait()
            await self._held.changed.wait()
            if await self._report():
                await asyncio.sleep(INTERVAL_S)
            else:
                await asyncio.sleep(RETRY_S)
                self._held.start_over()

    async def _report(self) -> bool:
        """Returns whether Redis has noted all that it was sent so far."""
        news = self._held.take(MAX_DIGESTS)
        try:
            num_noted = await self._queue.note_prefixes(
                self._worker_id, self._lease_ms, news.held, news.lost, is_first=news.is_first
            )
        except TransportError as error:  # Intake and Heartbeat log outages
            log.debug("prefixes were not reported", extra={"error": str(error)})
            return False
        return num_noted == self._held.num_noted
