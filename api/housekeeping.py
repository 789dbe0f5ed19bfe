"""Housekeeping: the periodic work of a frontend: its lease, its readers, health, files, keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from api.auth.keys import KeyRing
from api.files.service import FileService
from api.generation.models import ModelCatalog
from api.jobs.accepted_jobs import AcceptedJobs
from api.jobs.disconnects import ATTACH_ROUNDS, DisconnectTracker
from api.system.health import HealthMonitor
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait
from shared.transport.ports.admission import SubmittingStore
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
ATTACH_S = 2.0  # from one attach of a reader to its next
KEYS_S = 2.0
REPORT_S = 2.0  # between reports of this frontend to the dashboard
FILES_S = 10.0
KEEP_S = 60.0
MAX_ROUND_S = 10.0  # then a round counts as failed


class Housekeeping:
    """Renews the frontend's lease and reaps expired jobs once a second, whatever else fails.

    Attaches readers; refreshes health and models at the health interval; sweeps files and reloads
    the file of keys now and then. A frontend that was paused for longer than its lease learns so
    from its next heartbeat: all its readers attach again before it reaps, so that it ends none of
    its own jobs as orphans.
    """

    def __init__(
        self,
        store: SubmittingStore,
        disconnects: DisconnectTracker,
        accepted: AcceptedJobs,
        health: HealthMonitor,
        catalog: ModelCatalog,
        files: FileService,
        ring: KeyRing,
        report: Callable[[], Awaitable[object]],
        *,
        frontend_id: str,
        lease_ms: int,
        health_interval_s: float,
    ) -> None:
        self._store = store
        self._disconnects = disconnects
        self._accepted = accepted
        self._health = health
        self._catalog = catalog
        self._files = files
        self._ring = ring
        self._report = report
        self._frontend_id = frontend_id
        self._lease_ms = lease_ms
        self._health_interval_s = health_interval_s
        self._tasks: list[asyncio.Task[None]] = []
        self._heartbeat_s: float | None = None  # when the last heartbeat was confirmed
        self._has_lapsed = False  # the lease had ended, and not all readers have attached since

    def start(self) -> None:
        rounds: list[tuple[str, float, Callable[[], Awaitable[object]]]] = [
            ("heartbeat", HEARTBEAT_S, self._heartbeat),
            ("reap", HEARTBEAT_S, self._reap),
            ("readers", ATTACH_S / ATTACH_ROUNDS, self._disconnects.attach_some),
            ("disconnects", HEARTBEAT_S, self._disconnects.retry),
            ("accepted jobs", HEARTBEAT_S, self._accepted.look),
            ("health", self._health_interval_s, self._health.refresh),
            ("models", self._health_interval_s, self._catalog.refresh),
            ("kept models", KEEP_S, self._catalog.keep),
            ("report", REPORT_S, self._report),
            ("files", FILES_S, self._files.sweep),
            ("keys", KEYS_S, self._ring.refresh),
        ]
        self._tasks = [
            asyncio.create_task(_repeat(name, interval_s, work), name=f"housekeeping-{name}")
            for name, interval_s, work in rounds
        ]

    async def aclose(self) -> None:
        await cancel_and_wait(*self._tasks)
        self._tasks = []

    async def _heartbeat(self) -> None:
        last_s = self._heartbeat_s  # before the call: the very first ones are two at a time
        is_in_time = await self._store.frontend_heartbeat(self._frontend_id, self._lease_ms)
        self._heartbeat_s = time.monotonic()
        if not is_in_time and last_s is not None:
            self._has_lapsed = True
            since_s = round(self._heartbeat_s - last_s, 2)
            log.warning("the frontend's lease expired", extra={"since_last_beat_s": since_s})

    async def _reap(self) -> None:
        """Reaps once this frontend's own lease runs and its readers have attached."""
        await self._heartbeat()
        if self._has_lapsed:
            await self._disconnects.attach_all()
            self._has_lapsed = False
        await self._store.reap()


async def _repeat(name: str, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
    failing, recovered = f"housekeeping fails: {name}", f"housekeeping succeeds again: {name}"
    outage = RateLimitedOutageLog(log, failing=failing, recovered=recovered, of=STORE)
    faulty = RateLimitedOutageLog(log, failing=failing, recovered=recovered)
    while True:
        try:
            async with asyncio.timeout(MAX_ROUND_S):
                await work()
            outage.succeeded()
            faulty.succeeded()
        except (TransportError, TimeoutError) as error:
            outage.failed(reason=str(error) or type(error).__name__)
        except Exception as error:
            log.exception(failing)
            faulty.failed(reason=repr(error))
        await asyncio.sleep(interval_s)
