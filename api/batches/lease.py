"""BatchLease: renews the lease on a batch and saves the batch's progress under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from shared.backoff import Backoff
from shared.transport.ports.batches import (
    BatchClaim,
    BatchEnd,
    BatchError,
    BatchProgress,
    BatchStatus,
    BatchStore,
    Saved,
)
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_S = 0.5
MAX_HEARTBEAT_S = 1.0
MAX_FENCES = 1000  # earlier owners whose unused blobs are named at the end


class StopReason(StrEnum):
    """Why a batch stops before its last row."""

    CANCEL = "cancel"
    EXPIRE = "expire"


class StopEvent:
    """Set when a batch is to stop before its last row. The first reason stays."""

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self._event = asyncio.Event()

    def set(self, reason: StopReason) -> None:
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s`. Returns whether the event is set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self.reason is not None


_END_STATUS = {
    None: BatchStatus.COMPLETED,
    StopReason.CANCEL: BatchStatus.CANCELLED,
    StopReason.EXPIRE: BatchStatus.EXPIRED,
}


class BatchLease:
    """The lease of one claim.

    Every call to the store is retried until the store is back. After `is_leaving` is set it raises
    TransportError instead. Every method that calls the store raises LeaseLost.
    """

    def __init__(self, batches: BatchStore, claim: BatchClaim, lease_ms: int) -> None:
        self.claim = claim
        self.stop = StopEvent()
        self.is_leaving = False
        self.heartbeat_s = min(MAX_HEARTBEAT_S, lease_ms / 4000)
        self._batches = batches
        self._lease_ms = lease_ms
        self._saved_s = self._deadline_s = time.monotonic()

    def time_left_ms(self) -> int:
        """Returns the milliseconds until the batch expires, as of the store's last reply."""
        return round((self._deadline_s - time.monotonic()) * 1000)

    def blob_name(self, ending: str, fence: int | None = None) -> str:
        """Returns the name of a blob that this owner writes; no other claim has the same."""
        return f"{self.claim.batch_id}.{fence or self.claim.fence}.{ending}"

    async def heartbeat(self) -> None:
        """Renews the lease when that is due."""
        if time.monotonic() - self._saved_s >= self.heartbeat_s:
            await self.save()
        elif self.time_left_ms() <= 0:
            self.stop.set(StopReason.EXPIRE)

    async def save(
        self,
        progress: BatchProgress | None = None,
        *,
        status: BatchStatus | None = None,
        job_ids: Sequence[str] = (),
    ) -> None:
        """Renews the lease, as BatchStore.save. Sets `stop` when the batch is to stop."""

        async def call() -> Saved:
            return await self._batches.save(
                self.claim, self._lease_ms, progress, status=status, job_ids=job_ids
            )

        saved = await self._retried(call)
        self._saved_s = time.monotonic()
        self._deadline_s = self._saved_s + saved.left_ms / 1000
        if saved.status is BatchStatus.CANCELLING:
            self.stop.set(StopReason.CANCEL)
        elif saved.left_ms <= 0:
            self.stop.set(StopReason.EXPIRE)

    async def give_back(self) -> None:
        """Ends the lease: any frontend may claim the batch."""
        await self._retried(lambda: self._batches.save(self.claim, 0))

    async def fail(self, errors: Sequence[BatchError], progress: BatchProgress) -> None:
        """Ends the batch because of its input; completed rows are kept."""
        await self._end(BatchStatus.FAILED, progress, tuple(errors))

    async def end(self, progress: BatchProgress) -> None:
        """Ends the batch with its completed rows: completed, cancelled or expired, by `stop`."""
        await self.save(progress, status=BatchStatus.FINALIZING)
        await self._end(_END_STATUS[self.stop.reason], progress)

    async def _end(
        self, status: BatchStatus, progress: BatchProgress, errors: tuple[BatchError, ...] = ()
    ) -> None:
        end = BatchEnd(
            status,
            errors,
            output=progress.output,
            error_output=progress.error_output,
            useless=self._unused_blobs(progress),
        )
        ended = await self._retried(lambda: self._batches.end(self.claim, end))
        log.info("a batch ended", extra={"batch_id": self.claim.batch_id, "status": ended})

    def _unused_blobs(self, progress: BatchProgress) -> list[str]:
        """Returns the names of blobs that owners may have written and never saved."""
        used = {part.name for part in (*progress.output, *progress.error_output)}
        fences = range(max(1, self.claim.fence - MAX_FENCES), self.claim.fence + 1)
        names = (self.blob_name(ending, fence) for fence in fences for ending in ("out", "err"))
        return [name for name in names if name not in used]

    async def _retried(self, call: Callable[[], Awaitable[Result]]) -> Result:
        backoff = Backoff(RETRY_S, RETRY_S)
        while True:
            try:
                return await call()
            except TransportError:
                if self.is_leaving:
                    raise
                await backoff.wait()
