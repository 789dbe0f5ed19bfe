"""Housekeeping: what a frontend does by itself, again and again, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from api.accepted_jobs import AcceptedJobs
from api.catalog import ModelCatalog
from api.departures import Departures
from api.files import Files
from api.health import HealthMonitor
from api.key_ring import KeyRing
from api.tasks import stop_tasks
from shared.transport.base import JobStore, TransportError

log = logging.getLogger(__name__)

BEAT_S = 1.0
KEYS_S = 2.0
FILES_S = 10.0
KEEP_S = 60.0
MAX_ROUND_S = 10.0  # then a round counts as failed


class Housekeeping:
    """Beat and reap once a second; look at workers, queue and models at the health interval, at
    what files are to be removed and at the file of keys now and then."""

    def __init__(
        self,
        store: JobStore,
        departures: Departures,
        accepted: AcceptedJobs,
        health: HealthMonitor,
        catalog: ModelCatalog,
        files: Files,
        ring: KeyRing,
        *,
        frontend_id: str,
        lease_ms: int,
        health_interval_s: float,
    ) -> None:
        self._store = store
        self._departures = departures
        self._accepted = accepted
        self._health = health
        self._catalog = catalog
        self._files = files
        self._ring = ring
        self._frontend_id = frontend_id
        self._lease_ms = lease_ms
        self._health_interval_s = health_interval_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        rounds: list[tuple[str, float, Callable[[], Awaitable[object]]]] = [
            ("beat", BEAT_S, self._beat),
            ("reap", BEAT_S, self._store.reap),
            ("departures", BEAT_S, self._departures.retry),
            ("accepted jobs", BEAT_S, self._accepted.look),
            ("health", self._health_interval_s, self._health.refresh),
            ("models", self._health_interval_s, self._catalog.refresh),
            ("kept models", KEEP_S, self._catalog.keep),
            ("files", FILES_S, self._files.sweep),
            ("keys", KEYS_S, self._ring.refresh),
        ]
        self._tasks = [
            asyncio.create_task(_forever(name, every_s, work), name=f"housekeeping-{name}")
            for name, every_s, work in rounds
        ]

    async def aclose(self) -> None:
        await stop_tasks(*self._tasks)
        self._tasks = []

    async def _beat(self) -> None:
        await self._store.beat_frontend(self._frontend_id, self._lease_ms)


async def _forever(name: str, every_s: float, work: Callable[[], Awaitable[object]]) -> None:
    failing = False
    while True:
        try:
            async with asyncio.timeout(MAX_ROUND_S):
                await work()
            if failing:
                log.info("works again", extra={"round": name})
            failing = False
        except (TransportError, TimeoutError) as error:
            if not failing:  # once per outage, not once per second
                log.warning("round failed", extra={"round": name, "reason": str(error)})
            failing = True
        except Exception:
            log.exception("round failed", extra={"round": name})
            failing = True
        await asyncio.sleep(every_s)
