"""LeaseKeeper: one owner's words to the store about its batch, and what it hears back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from shared.transport.ports.batches import (
    BatchEnd,
    BatchError,
    BatchLease,
    BatchProgress,
    BatchStatus,
    BatchStore,
    Saved,
)
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_S = 0.5
MAX_BEAT_S = 1.0
MAX_FENCES = 1000  # earlier owners whose useless blobs are named at the end


class LeaseKeeper:
    """Waits for a store that is away, for as long as it takes, unless it is leaving: then every
    method may raise TransportError. All of them raise LeaseLost."""

    def __init__(self, batches: BatchStore, lease: BatchLease, lease_ms: int) -> None:
        self.lease = lease
        self.stop = StopSign()
        self.is_leaving = False
        self.beat_s = min(MAX_BEAT_S, lease_ms / 4000)
        self._batches = batches
        self._lease_ms = lease_ms
        self._saved_s = self._deadline_s = time.monotonic()

    def time_left_ms(self) -> int:
        """Until the batch expires, as of the last word from the store."""
        return round((self._deadline_s - time.monotonic()) * 1000)

    def blob_name(self, ending: str, fence: int | None = None) -> str:
        """Of a blob that an owner writes; no two leases write the same."""
        return f"{self.lease.batch_id}.{fence or self.lease.fence}.{ending}"

    async def beat(self) -> None:
        """Renews the lease where it is time to."""
        if time.monotonic() - self._saved_s >= self.beat_s:
            await self.save()
        elif self.time_left_ms() <= 0:
            self.stop.set(Stop.EXPIRE)

    async def save(
        self,
        progress: BatchProgress | None = None,
        *,
        status: BatchStatus | None = None,
        job_ids: Sequence[str] = (),
    ) -> None:
        """As BatchStore.save. Sets the stop sign when the batch is to stop."""

        async def call() -> Saved:
            return await self._batches.save(
                self.lease, self._lease_ms, progress, status=status, job_ids=job_ids
            )

        saved = await self._said(call)
        self._saved_s = time.monotonic()
        self._deadline_s = self._saved_s + saved.left_ms / 1000
        if saved.status is BatchStatus.CANCELLING:
            self.stop.set(Stop.CANCEL)
        elif saved.left_ms <= 0:
            self.stop.set(Stop.EXPIRE)

    async def give_back(self) -> None:
        """Anybody may run the batch now."""
        await self._said(lambda: self._batches.save(self.lease, 0))

    async def fail(self, errors: Sequence[BatchError], progress: BatchProgress) -> None:
        """The batch ends because of its input; what was done is kept."""
        await self._end(BatchStatus.FAILED, progress, tuple(errors))

    async def end(self, progress: BatchProgress) -> None:
        """The batch ends with what is done: completed, or as the stop sign says."""
        await self.save(progress, status=BatchStatus.FINALIZING)
        await self._end(_ENDS[self.stop.why], progress)

    async def _end(
        self, status: BatchStatus, progress: BatchProgress, errors: tuple[BatchError, ...] = ()
    ) -> None:
        end = BatchEnd(
            status,
            errors,
            output=progress.output,
            error_output=progress.error_output,
            useless=self._useless(progress),
        )
        ended = await self._said(lambda: self._batches.end(self.lease, end))
        log.info("batch ended", extra={"batch_id": self.lease.batch_id, "status": ended})

    def _useless(self, progress: BatchProgress) -> list[str]:
        """What owners wrote and never saved."""
        used = {part.name for part in (*progress.output, *progress.error_output)}
        fences = range(max(1, self.lease.fence - MAX_FENCES), self.lease.fence + 1)
        names = (self.blob_name(ending, fence) for fence in fences for ending in ("out", "err"))
        return [name for name in names if name not in used]

    async def _said(self, call: Callable[[], Awaitable[Result]]) -> Result:
        while True:
            try:
                return await call()
            except TransportError:
                if self.is_leaving:
                    raise
                await asyncio.sleep(RETRY_S)


# StopSign: that a batch is to stop before its last row, and why.


class Stop(StrEnum):
    """Why: somebody cancelled it, or its time is over."""

    CANCEL = "cancel"
    EXPIRE = "expire"


class StopSign:
    """Seen by all rows of a batch. Once set, it stays as it was set first."""

    def __init__(self) -> None:
        self.why: Stop | None = None
        self._event = asyncio.Event()

    def set(self, why: Stop) -> None:
        self.why = self.why or why
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is set, after at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self.why is not None


_ENDS = {
    None: BatchStatus.COMPLETED,
    Stop.CANCEL: BatchStatus.CANCELLED,
    Stop.EXPIRE: BatchStatus.EXPIRED,
}
