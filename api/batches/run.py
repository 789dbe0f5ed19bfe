"""BatchRun: one batch under one lease, from where the last owner left it to its end.

What is done is on the disk first, then in Redis: a run that dies at any point costs the rows since
its last save nothing but being looked up again, because their jobs are found by their ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from api.batches.endpoints import ENDPOINTS
from api.batches.input import InputCheck, LineReader
from api.batches.lease import LeaseKeeper, Stop
from api.batches.row_room import RowRoom
from api.batches.rows import RowsPolicy, RowsRun
from api.files.storage import BlobDamaged
from api.services import Services
from shared.transport.ports.batches import (
    BatchError,
    BatchLease,
    BatchProgress,
    BatchRecord,
    BatchStatus,
)
from shared.transport.ports.files import FilePart

CHECK_LINES = 4096  # validated between looks at the lease
CHECK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunRoom:
    """What the runs of a frontend share."""

    services: Services
    preparing: asyncio.Semaphore  # rows that read their prompts at once
    policy: RowsPolicy
    max_rows: int
    lease_ms: int


class BatchRun:
    """Not safe for several tasks but for `leave`."""

    def __init__(self, room: RunRoom, lease: BatchLease) -> None:
        self.lease = lease
        self._room = room
        self._keeper = LeaseKeeper(room.services.batches, lease, room.lease_ms)

    def leave(self) -> None:
        """Give the batch back soon; what runs goes on, and its next owner finds it."""
        self._keeper.is_leaving = True

    async def run(self) -> None:
        """Returns when the batch has ended or was given back.

        Raises LeaseLost, TransportError, and OSError, BlobDamaged or BlobsUnavailable when this
        frontend cannot read or write the batch's files.
        """
        keeper, room = self._keeper, self._room
        await keeper.save()
        record = await room.services.batches.get(self.lease.batch_id)
        if record is None:
            return
        source = await room.services.files.index.get(record.input_file_id, record.tenant)
        if source is None or len(source.parts) != 1:
            error = BatchError("input_file_missing", "The input file is gone.")
            await keeper.fail([error], record.progress)
            return
        part = source.parts[0]
        try:
            await room.services.files.blobs.check([part])
        except BlobDamaged:
            if keeper.stop.why is not Stop.EXPIRE:
                raise  # another frontend may have it
            await keeper.end(record.progress)
            return
        await room.services.files.blobs.touch(part.name)
        progress: BatchProgress | None = record.progress
        if not record.progress.total:
            progress = await self._validated(record, part)
        if progress is not None:
            await self._rows_run(record, part, progress).run()

    def _rows_run(self, record: BatchRecord, part: FilePart, progress: BatchProgress) -> RowsRun:
        room = self._room
        rows = RowRoom(
            services=room.services,
            endpoint=ENDPOINTS[record.endpoint],
            tenant=record.tenant,
            stop=self._keeper.stop,
            submitting=asyncio.Lock(),
            preparing=room.preparing,
            time_left_ms=self._keeper.time_left_ms,
        )
        return RowsRun(
            self._keeper, room.services.files.blobs, room.policy, rows, record, part, progress
        )

    async def _validated(self, record: BatchRecord, part: FilePart) -> BatchProgress | None:
        """The batch is in progress; None: it has ended, or was given back."""
        keeper = self._keeper
        max_line_bytes = self._room.policy.max_line_bytes
        check = InputCheck(record.endpoint, self._room.max_rows, max_line_bytes)
        digest = await self._read_all(part, check, is_second=False)
        is_damaged = digest not in (None, part.sha256) and not check.is_hopeless
        is_whole = digest is not None and not is_damaged
        if is_whole and await self._beating(check.needs_second_pass):
            await self._read_all(part, check, is_second=True)
        if keeper.is_leaving:
            await keeper.give_back()
        elif keeper.stop.why is not None:
            await keeper.end(BatchProgress())
        elif is_damaged:
            said = "The input file's content is not what was uploaded."
            await keeper.fail([BatchError("input_file_damaged", said)], BatchProgress())
        elif check.errors:
            await keeper.fail(check.errors, BatchProgress())
        else:
            progress = BatchProgress(total=check.num_rows, model=check.model)
            await keeper.save(progress, status=BatchStatus.IN_PROGRESS)
            return progress
        return None

    async def _beating(self, work: Callable[[], bool]) -> bool:
        """`work` on a thread; the lease is kept meanwhile."""
        working = asyncio.ensure_future(self._room.services.files.blobs.run(work))
        while not (await asyncio.wait((working,), timeout=self._keeper.beat_s))[0]:
            await self._keeper.beat()
        return working.result()

    async def _read_all(self, part: FilePart, check: InputCheck, *, is_second: bool) -> str | None:
        """The content's digest, once the check has seen what it wants to; None: it must stop."""
        keeper, blobs = self._keeper, self._room.services.files.blobs
        max_line_bytes = self._room.policy.max_line_bytes
        reader = await blobs.run(LineReader, blobs.path_of(part), part.num_bytes, max_line_bytes)
        feed = check.feed_again if is_second else check.feed

        def step() -> None:
            feed(reader.read(CHECK_LINES, CHECK_BYTES))

        try:
            while not reader.has_ended and not check.is_hopeless:
                await blobs.run(step)
                await keeper.beat()
                if keeper.stop.why is not None or keeper.is_leaving:
                    return None
            return reader.sha256
        finally:
            reader.close()
