"""RowScheduler: keeps a window of a batch's rows in flight, and saves their results."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence

from api.batches.input import Line, LineReader, RowInvalid, parse_row
from api.batches.lease import StopReason
from api.batches.results import ResultFile, RowResult
from api.batches.row import RowContext, RowTask
from api.files.storage import BlobDamaged
from shared.messages import Usage
from shared.tasks import cancel_and_wait
from shared.transport.ports.batches import BatchProgress, BatchRecord, row_job_id
from shared.transport.ports.files import FilePart

READ_LINES = 256
READ_BYTES = 1024 * 1024
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024  # lines of rows that run
MAX_RESULTS = 1024  # written at once
CLOSE_S = 5.0


class RowScheduler:
    """Runs the rows of one batch under one lease. Use it once."""

    def __init__(
        self,
        context: RowContext,
        record: BatchRecord,
        part: FilePart,
        progress: BatchProgress,
    ) -> None:
        lease, storage = context.lease, context.run.storage
        self._context = context
        self._lease = lease
        self._storage = storage
        self._record = record
        self._part = part
        self._progress = progress
        self._bounds = context.run.bounds
        self._window = LineWindow(progress)
        # Earlier owners have started no line from here on.
        self._known_until = progress.low_line + (SPAN_LINES if lease.claim.fence > 1 else 0)
        self._output = ResultFile(storage, progress.output, lease.blob_name("out"))
        self._errors = ResultFile(storage, progress.error_output, lease.blob_name("err"))
        self._lines: deque[Line] = deque()  # read and not started
        self._running: dict[asyncio.Task[RowResult], int] = {}  # -> bytes of its line

    async def run(self) -> None:
        """Returns when the batch has ended or was given back. Raises as BatchTask.run."""
        reader = await self._storage.run(self._open)
        try:
            while not self._lease.is_leaving:
                results = await self._begin_rows(reader)
                if not results and not self._running:
                    await self._lease.end(self._progress)
                    return
                await self._save(results or await self._wait_for_results())
            await self._lease.give_back()
        finally:
            await self._stop_rows()
            reader.close()
            await self._output.aclose()
            await self._errors.aclose()

    async def _stop_rows(self) -> None:
        """Stops reading the running jobs; the jobs continue."""
        for task in self._running:
            task.cancel()
        if self._running:  # time to unsubscribe, which a second cancel would cut short
            await asyncio.wait(self._running, timeout=CLOSE_S)
        await cancel_and_wait(*self._running)

    def _open(self) -> LineReader:
        return LineReader(
            self._storage.path_of(self._part),
            self._part.num_bytes,
            self._bounds.max_line_bytes,
            line=self._window.low_line,
            offset=self._window.low_offset,
        )

    async def _begin_rows(self, reader: LineReader) -> list[RowResult]:
        """Starts rows until the window is full. Returns the results of rows that need no job."""
        results: list[RowResult] = []
        while self._has_capacity() and len(results) < MAX_RESULTS:
            line = await self._next_line(reader)
            if line is None:
                break
            if not self._window.begin(line.number, line.end_offset):
                continue
            if line.is_blank:
                self._window.finish(line.number)
                continue
            result = self._begin(line)
            if result is not None:
                results.append(result)
        return results

    def _has_capacity(self) -> bool:
        return (
            len(self._running) < self._bounds.max_in_flight
            and sum(self._running.values()) < MAX_BYTES_IN_FLIGHT
            and not self._window.is_full
        )

    async def _next_line(self, reader: LineReader) -> Line | None:
        """Returns None at the end of the file, and where a cancelled batch ends."""
        if not self._lines:
            self._lines.extend(await self._storage.run(reader.read, READ_LINES, READ_BYTES))
        if not self._lines:
            return None
        is_new = self._lines[0].number >= self._known_until
        if is_new and self._lease.stop.reason is StopReason.CANCEL:
            return None
        return self._lines.popleft()

    def _begin(self, line: Line) -> RowResult | None:
        try:
            row = parse_row(line, self._record.endpoint, self._bounds.max_line_bytes)
        except RowInvalid as invalid:
            raise BlobDamaged(f"a validated line has changed: {invalid}") from invalid
        # The same for every owner, though the number of partitions has changed since.
        store, num = self._context.run.jobs.admission.store, self._record.num_partitions
        partition = store.partition_for(str(line.number), num)
        job_id = row_job_id(self._record.batch_id, line.number, partition)
        may_exist = line.number < self._known_until
        row_task = RowTask(self._context, row, line.number, job_id, may_exist=may_exist)
        if self._lease.stop.reason is StopReason.EXPIRE and not may_exist:
            return row_task.expired()
        task = asyncio.create_task(row_task.run(), name=f"row-{job_id}")
        self._running[task] = len(line.data or b"")
        return None

    async def _wait_for_results(self) -> list[RowResult]:
        """Returns the results of rows that have ended, after at most one heartbeat interval."""
        done, _ = await asyncio.wait(
            self._running, timeout=self._lease.heartbeat_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            del self._running[task]
        return [task.result() for task in done]

    async def _save(self, results: Sequence[RowResult]) -> None:
        """Makes these results part of the batch: on the disk first, then in the store."""
        if not results:
            await self._lease.heartbeat()
            return
        lines = [(result.is_success, result.text) for result in results if result.text is not None]
        completed = [text for is_success, text in lines if is_success]
        failed = [text for is_success, text in lines if not is_success]
        await self._output.append(completed)
        await self._errors.append(failed)
        for result in results:
            self._window.finish(result.line)
        before = self._progress
        self._progress = dataclasses.replace(
            before,
            completed=before.completed + len(completed),
            failed=before.failed + len(failed),
            low_line=self._window.low_line,
            low_offset=self._window.low_offset,
            done_bits=self._window.done_bits,
            usage=_sum([before.usage, *(result.usage for result in results)]),
            output=self._output.parts,
            error_output=self._errors.parts,
        )
        job_ids = [result.job_id for result in results if result.job_id is not None]
        await self._lease.save(self._progress, job_ids=job_ids)
        counter = self._context.run.jobs.metrics.batch_rows
        counter.labels("completed").inc(len(completed))
        counter.labels("failed").inc(len(failed))


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


SPAN_LINES = 4096  # from the first unfinished line to the last one started


class _Begun:
    __slots__ = ("end_offset", "is_done")

    def __init__(self, end_offset: int, is_done: bool) -> None:
        self.end_offset = end_offset
        self.is_done = is_done


class LineWindow:
    """Tracks which lines of a batch are done, in bounded space.

    Lines begin in order and end in any order. Every line before `low_line` is done.
    """

    def __init__(self, progress: BatchProgress) -> None:
        self.low_line = progress.low_line
        self.low_offset = progress.low_offset
        self._known_from = progress.low_line
        self._known_bits = progress.done_bits
        self._begun: dict[int, _Begun] = {}  # in order

    @property
    def is_full(self) -> bool:
        """Whether no line may begin before the oldest is done."""
        return len(self._begun) >= SPAN_LINES

    def begin(self, line: int, end_offset: int) -> bool:
        """Begins the next line in order. Returns False where it is done already."""
        assert line == self.low_line + len(self._begun), "lines begin in order"
        is_done = bool(self._known_bits >> (line - self._known_from) & 1)
        self._begun[line] = _Begun(end_offset, is_done)
        if is_done:
            self._advance()
        return not is_done

    def finish(self, line: int) -> None:
        self._begun[line].is_done = True
        self._advance()

    @property
    def done_bits(self) -> int:
        """The bits of BatchProgress, including lines that an earlier owner has finished."""
        bits = self._known_bits >> (self.low_line - self._known_from)
        for place, begun in enumerate(self._begun.values()):
            if begun.is_done:
                bits |= 1 << place
        return bits

    def _advance(self) -> None:
        while self._begun:
            begun = next(iter(self._begun.values()))
            if not begun.is_done:
                return
            self._begun.pop(self.low_line)
            self.low_line += 1
            self.low_offset = begun.end_offset
