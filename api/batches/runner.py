"""BatchRunner: claims batches and runs each of them from where its last owner left it.

Results are written to the disk first and saved in Redis second. After a crash at any point the next
owner repeats the rows since the last save; it finds their jobs by their ids, and runs none twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from api.batches.input import InputCheck, LineReader, RowInvalid
from api.batches.lease import BatchLease, StopReason
from api.batches.row import RowContext, RunContext
from api.batches.rows import RowScheduler
from api.files.storage import BlobDamaged, BlobsUnavailable
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait
from shared.transport.ports.batches import (
    BatchClaim,
    BatchError,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    LeaseLost,
)
from shared.transport.ports.files import FilePart
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

CLAIM_EVERY_S = 1.0
UNWANTED_S = 30.0  # for which a batch whose files cannot be read here is left to other frontends
CLOSE_S = 5.0  # for giving batches back at shutdown
CHECK_LINES = 4096  # validated between heartbeats
CHECK_BYTES = 1024 * 1024


class BatchTask:
    """Runs one claimed batch. For one task at a time, but for `leave`."""

    def __init__(self, context: RunContext, claim: BatchClaim) -> None:
        self.claim = claim
        self._context = context
        self._storage = context.storage
        self._bounds = context.bounds
        self._lease = BatchLease(context.batches, claim, context.bounds.lease_ms)

    def leave(self) -> None:
        """Makes `run` release the batch soon; its jobs continue, and its next owner finds them."""
        self._lease.is_leaving = True

    async def run(self) -> None:
        """Returns when the batch has ended or was given back.

        Raises LeaseLost, TransportError, and OSError, BlobDamaged or BlobsUnavailable when this
        frontend cannot read or write the batch's files.
        """
        lease = self._lease
        await lease.save()
        record = await self._context.batches.get(self.claim.batch_id)
        if record is None:
            return
        source = await self._context.index.get(record.input_file_id, record.tenant)
        if source is None or len(source.parts) != 1:
            error = BatchError("input_file_missing", "The input file no longer exists.")
            await lease.fail([error], record.progress)
            return
        part = source.parts[0]
        try:
            await self._storage.check([part])
        except BlobDamaged:
            if lease.stop.reason is not StopReason.EXPIRE:
                raise  # another frontend may have it
            await lease.end(record.progress)
            return
        await self._storage.touch(part.name)
        progress: BatchProgress | None = record.progress
        if not record.progress.total:
            progress = await self._validate(record, part)
        if progress is not None:
            endpoint = self._context.endpoints[record.endpoint]
            rows = RowContext(self._context, endpoint, record.tenant, lease)
            await RowScheduler(rows, record, part, progress).run()

    async def _validate(self, record: BatchRecord, part: FilePart) -> BatchProgress | None:
        """Reads the input and saves the batch as in progress; None: it ended, or was given back."""
        lease = self._lease
        check = InputCheck(record.endpoint, self._bounds.max_rows, self._bounds.max_line_bytes)
        digest = await self._read_all(part, check)
        is_damaged = digest not in (None, part.sha256) and not check.is_hopeless
        if digest is not None and not is_damaged:
            path = self._storage.path_of(part)
            await self._with_heartbeat(lambda: check.finish(path, part.num_bytes))
        if lease.is_leaving:
            await lease.give_back()
        elif lease.stop.reason is not None:
            await lease.end(BatchProgress())
        elif is_damaged:
            message = "The input file's content differs from the upload."
            await lease.fail([BatchError("input_file_damaged", message)], BatchProgress())
        elif check.errors:
            await lease.fail(check.errors, BatchProgress())
        else:
            progress = BatchProgress(total=check.num_rows, model=check.model)
            await lease.save(progress, status=BatchStatus.IN_PROGRESS)
            return progress
        return None

    async def _read_all(self, part: FilePart, check: InputCheck) -> str | None:
        """Feeds the input to `check`. Returns the digest of the input; None: stop."""
        lease, storage = self._lease, self._storage
        reader = await storage.run(
            LineReader, storage.path_of(part), part.num_bytes, self._bounds.max_line_bytes
        )

        def step() -> None:
            check.feed(reader.read(CHECK_LINES, CHECK_BYTES))

        try:
            while not reader.has_ended and not check.is_hopeless:
                await storage.run(step)
                await lease.heartbeat()
                if lease.stop.reason is not None or lease.is_leaving:
                    return None
            return reader.sha256
        finally:
            reader.close()

    async def _with_heartbeat(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread and renews the lease meanwhile."""
        working = asyncio.ensure_future(self._storage.run(work))
        while not (await asyncio.wait((working,), timeout=self._lease.heartbeat_s))[0]:
            await self._lease.heartbeat()
        try:
            working.result()
        except RowInvalid as invalid:
            raise BlobDamaged(f"a validated line has changed: {invalid}") from invalid


class BatchRunner:
    """Claims batches that no frontend runs, and runs up to `max_batches` at once.

    `start`, then `aclose`.
    """

    def __init__(self, context: RunContext, *, max_batches: int) -> None:
        self._context = context
        self._max_batches = max_batches
        self._running: dict[asyncio.Task[None], BatchTask] = {}
        self._unwanted: dict[str, float] = {}  # batch id -> until when, by time.monotonic
        self._claiming: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        if self._max_batches:
            self._claiming = asyncio.create_task(self._claim_forever(), name="batches")

    async def aclose(self) -> None:
        """Releases the batches; their jobs continue, and another frontend takes them over."""
        if self._claiming is not None:
            await cancel_and_wait(self._claiming)
        for batch in self._running.values():
            batch.leave()
        if self._running:
            await asyncio.wait(list(self._running), timeout=CLOSE_S)
        await cancel_and_wait(*self._running)

    async def _claim_forever(self) -> None:
        outage = RateLimitedOutageLog(
            log,
            failing="failed to claim batches; trying again",
            recovered="batches are claimed again",
            of=STORE,
        )
        while True:
            try:
                while self._has_capacity() and (claim := await self._claim()) is not None:
                    self._begin(claim)
                outage.succeeded()
            except TransportError as error:
                outage.failed(reason=str(error))
            except Exception:
                log.exception("failed to claim a batch")
            await asyncio.sleep(CLAIM_EVERY_S)

    def _has_capacity(self) -> bool:
        return (
            len(self._running) < self._max_batches
            and self._context.storage.is_available
            and self._context.jobs.open_requests.closed is None
        )

    async def _claim(self) -> BatchClaim | None:
        now_s = time.monotonic()
        self._unwanted = {name: at_s for name, at_s in self._unwanted.items() if at_s > now_s}
        frontend_id, lease_ms = self._context.jobs.frontend_id, self._context.bounds.lease_ms
        return await self._context.batches.claim(frontend_id, lease_ms, list(self._unwanted))

    def _begin(self, claim: BatchClaim) -> None:
        log.info("claimed a batch", extra={"batch_id": claim.batch_id, "fence": claim.fence})
        batch = BatchTask(self._context, claim)
        task = asyncio.create_task(self._run(batch), name=f"batch-{claim.batch_id}")
        self._running[task] = batch
        task.add_done_callback(lambda ended: self._running.pop(ended, None))

    async def _run(self, batch: BatchTask) -> None:
        """Raises nothing but CancelledError."""
        claim = batch.claim
        fields = {"batch_id": claim.batch_id, "fence": claim.fence}
        try:
            await batch.run()
            return
        except LeaseLost:
            log.info("lost the lease of a batch", extra=fields)
            return
        except TransportError as error:
            log.warning("stopped running a batch", extra={**fields, "reason": str(error)})
            return
        except (OSError, BlobDamaged, BlobsUnavailable) as error:
            log.error("this frontend cannot run the batch", extra={**fields, "reason": str(error)})
        except Exception:
            log.exception("a batch stopped with an unexpected error", extra=fields)
        self._unwanted[claim.batch_id] = time.monotonic() + UNWANTED_S
        try:
            await self._context.batches.save(claim, 0)
        except (LeaseLost, TransportError) as error:
            log.info(
                "failed to release a batch; its lease expires",
                extra={**fields, "reason": str(error)},
            )
