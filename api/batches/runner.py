"""BatchRunner: a frontend's share of the deployment's batches."""

from __future__ import annotations

import asyncio
import logging
import time

from api.batches.rows import RowsPolicy
from api.batches.run import BatchRun, RunRoom
from api.files.storage import BlobDamaged, BlobsUnavailable
from api.services import Services
from shared.logs import RateLimitedOutageLog
from shared.tasks import cancel_and_wait
from shared.transport.ports.batches import BatchLease, LeaseLost
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

CLAIM_EVERY_S = 1.0
PREPARING = 2  # prompts that batches read at once, of all threads for that
UNWANTED_S = 30.0  # a batch whose files cannot be used here is left to others for so long
LEAVE_S = 5.0  # for giving batches back when this frontend goes


class BatchRunner:
    """Claims batches that nobody runs and runs them, `at_once` of them. `start`, then `aclose`."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._services = services
        self._batches = services.batches
        self._files = services.files
        self._at_once = settings.batches_at_once
        self._lease_ms = settings.frontend_lease_ms
        self._room = RunRoom(
            services=services,
            preparing=asyncio.Semaphore(PREPARING),
            policy=RowsPolicy(settings.batch_rows_in_flight, settings.max_body_bytes),
            max_rows=settings.max_batch_rows,
            lease_ms=settings.frontend_lease_ms,
        )
        self._runs: dict[asyncio.Task[None], BatchRun] = {}
        self._unwanted: dict[str, float] = {}  # batch id -> until when
        self._claiming: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def start(self) -> None:
        if self._at_once:
            self._claiming = asyncio.create_task(self._claim_forever(), name="batches")

    async def aclose(self) -> None:
        """Gives back what runs here; its rows go on, and another frontend takes them over."""
        if self._claiming is not None:
            await cancel_and_wait(self._claiming)
        for run in self._runs.values():
            run.leave()
        if self._runs:
            await asyncio.wait(list(self._runs), timeout=LEAVE_S)
        await cancel_and_wait(*self._runs)

    async def _claim_forever(self) -> None:
        outage = RateLimitedOutageLog(
            log, failing="no batch can be claimed", recovered="batches can be claimed"
        )
        while True:
            try:
                while self._wants_more() and (lease := await self._claim()) is not None:
                    self._begin(lease)
                outage.succeeded()
            except TransportError as error:
                outage.failed(reason=str(error))
            except Exception:
                log.exception("no batch claimed")
            await asyncio.sleep(CLAIM_EVERY_S)

    def _wants_more(self) -> bool:
        return (
            len(self._runs) < self._at_once
            and self._files.blobs.is_available
            and self._services.open_requests.closed is None
        )

    async def _claim(self) -> BatchLease | None:
        now_s = time.monotonic()
        self._unwanted = {name: at_s for name, at_s in self._unwanted.items() if at_s > now_s}
        return await self._batches.claim(
            self._services.frontend_id, self._lease_ms, list(self._unwanted)
        )

    def _begin(self, lease: BatchLease) -> None:
        log.info("batch claimed", extra={"batch_id": lease.batch_id, "fence": lease.fence})
        run = BatchRun(self._room, lease)
        task = asyncio.create_task(self._run(run), name=f"batch-{lease.batch_id}")
        self._runs[task] = run
        task.add_done_callback(lambda ended: self._runs.pop(ended, None))

    async def _run(self, run: BatchRun) -> None:
        """Never raises but CancelledError."""
        lease = run.lease
        fields = {"batch_id": lease.batch_id, "fence": lease.fence}
        try:
            await run.run()
            return
        except LeaseLost:
            log.info("batch lost", extra=fields)
            return
        except TransportError as error:
            log.warning("batch left", extra={**fields, "reason": str(error)})
            return
        except (OSError, BlobDamaged, BlobsUnavailable) as error:
            log.error("batch cannot be run here", extra={**fields, "reason": str(error)})
        except Exception:
            log.exception("batch stopped", extra=fields)
        self._unwanted[lease.batch_id] = time.monotonic() + UNWANTED_S
        try:
            await self._batches.save(lease, 0)
        except (LeaseLost, TransportError) as error:
            log.info("batch not given back", extra={**fields, "reason": str(error)})
