"""RowsRun: the rows of a batch, a window of them in flight, their results written and saved."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from api.batches.input import Line, LineReader, RowInvalid, parse_row
from api.batches.lease import LeaseKeeper, Stop
from api.batches.results import ResultFile, RowResult
from api.batches.row import RowRun
from api.batches.row_room import RowRoom
from api.files.storage import BlobDamaged, Blobs
from shared.messages import Usage
from shared.tasks import cancel_and_wait
from shared.transport.ports.batches import BatchProgress, BatchRecord, row_job_id
from shared.transport.ports.files import FilePart

READ_LINES = 256
READ_BYTES = 1024 * 1024
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024  # lines of rows that have no answer yet
MAX_RESULTS = 1024  # written at once
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RowsPolicy:
    """Bounds of every batch of a frontend."""

    rows_in_flight: int
    max_line_bytes: int


class RowsRun:
    """The rows of one batch under one lease. Use it once."""

    def __init__(
        self,
        keeper: LeaseKeeper,
        blobs: Blobs,
        policy: RowsPolicy,
        rows: RowRoom,
        record: BatchRecord,
        part: FilePart,
        progress: BatchProgress,
    ) -> None:
        self._keeper = keeper
        self._blobs = blobs
        self._policy = policy
        self._rows = rows
        self._record = record
        self._part = part
        self._progress = progress
        self._window = LineWindow(progress)
        # Earlier owners have begun no line from here on.
        self._known_until = progress.low_line + (SPAN_LINES if keeper.lease.fence > 1 else 0)
        self._output = ResultFile(blobs, progress.output, keeper.blob_name("out"))
        self._errors = ResultFile(blobs, progress.error_output, keeper.blob_name("err"))
        self._lines: deque[Line] = deque()  # read and not begun
        self._running: dict[asyncio.Task[RowResult], int] = {}  # -> bytes of its line

    async def run(self) -> None:
        """To the end of the batch, or until it is given back. Raises as BatchRun.run."""
        reader = await self._blobs.run(self._open)
        try:
            while not self._keeper.is_leaving:
                results = await self._begin_rows(reader)
                if not results and not self._running:
                    await self._keeper.end(self._progress)
                    return
                await self._keep(results or await self._ended())
            await self._keeper.give_back()
        finally:
            await self._stop_rows()
            reader.close()
            await self._output.aclose()
            await self._errors.aclose()

    async def _stop_rows(self) -> None:
        """Nobody reads them here any more; their jobs go on."""
        for task in self._running:
            task.cancel()
        if self._running:  # time to unsubscribe, which a second cancel would cut short
            await asyncio.wait(self._running, timeout=CLOSE_S)
        await cancel_and_wait(*self._running)

    def _open(self) -> LineReader:
        return LineReader(
            self._blobs.path_of(self._part),
            self._part.num_bytes,
            self._policy.max_line_bytes,
            line=self._window.low_line,
            offset=self._window.low_offset,
        )

    async def _begin_rows(self, reader: LineReader) -> list[RowResult]:
        """Fills the window. Results are those of rows that need no job."""
        results: list[RowResult] = []
        while self._has_room() and len(results) < MAX_RESULTS:
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

    def _has_room(self) -> bool:
        return (
            len(self._running) < self._policy.rows_in_flight
            and sum(self._running.values()) < MAX_BYTES_IN_FLIGHT
            and not self._window.is_full
        )

    async def _next_line(self, reader: LineReader) -> Line | None:
        """None at the end of the file, and where a cancel makes one."""
        if not self._lines:
            self._lines.extend(await self._blobs.run(reader.read, READ_LINES, READ_BYTES))
        if not self._lines:
            return None
        is_new = self._lines[0].number >= self._known_until
        if is_new and self._keeper.stop.why is Stop.CANCEL:
            return None
        return self._lines.popleft()

    def _begin(self, line: Line) -> RowResult | None:
        try:
            row = parse_row(line, self._record.endpoint, self._policy.max_line_bytes)
        except RowInvalid as invalid:
            raise BlobDamaged(f"a line that was valid is not: {invalid}") from invalid
        job_id = row_job_id(self._record.batch_id, line.number)
        may_be_there = line.number < self._known_until
        run = RowRun(self._rows, row, line.number, job_id, may_be_there=may_be_there)
        if self._keeper.stop.why is Stop.EXPIRE and not may_be_there:
            return run.expired()
        task = asyncio.create_task(run.run(), name=f"row-{job_id}")
        self._running[task] = len(line.data or b"")
        return None

    async def _ended(self) -> list[RowResult]:
        """Results of rows that have ended, after at most a beat."""
        done, _ = await asyncio.wait(
            self._running, timeout=self._keeper.beat_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            del self._running[task]
        return [task.result() for task in done]

    async def _keep(self, results: Sequence[RowResult]) -> None:
        """Returns when these results are part of the batch, whatever dies."""
        if not results:
            await self._keeper.beat()
            return
        said = [(result.is_success, result.text) for result in results if result.text is not None]
        good = [text for is_success, text in said if is_success]
        bad = [text for is_success, text in said if not is_success]
        await self._output.append(good)
        await self._errors.append(bad)
        for result in results:
            self._window.finish(result.line)
        before = self._progress
        self._progress = dataclasses.replace(
            before,
            completed=before.completed + len(good),
            failed=before.failed + len(bad),
            low_line=self._window.low_line,
            low_offset=self._window.low_offset,
            done_bits=self._window.done_bits,
            usage=_sum([before.usage, *(result.usage for result in results)]),
            output=self._output.parts,
            error_output=self._errors.parts,
        )
        job_ids = [result.job_id for result in results if result.job_id is not None]
        await self._keeper.save(self._progress, job_ids=job_ids)
        counted = self._rows.services.metrics.batch_rows
        counted.labels("completed").inc(len(good))
        counted.labels("failed").inc(len(bad))


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


# LineWindow: which lines of a batch are done, as few numbers as that takes.

SPAN_LINES = 4096  # from the first line that is not done to the last that was begun


class _Begun:
    __slots__ = ("end_offset", "is_done")

    def __init__(self, end_offset: int, is_done: bool) -> None:
        self.end_offset = end_offset
        self.is_done = is_done


class LineWindow:
    """Lines begin in order and end in any. Everything before `low_line` is done."""

    def __init__(self, progress: BatchProgress) -> None:
        self.low_line = progress.low_line
        self.low_offset = progress.low_offset
        self._known_from = progress.low_line
        self._known_bits = progress.done_bits
        self._begun: dict[int, _Begun] = {}  # in order

    @property
    def is_full(self) -> bool:
        """No line may begin before the oldest is done."""
        return len(self._begun) >= SPAN_LINES

    def begin(self, line: int, end_offset: int) -> bool:
        """The next line in order. False: it is done already."""
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
        """As BatchProgress. Lines that an earlier owner finished count before they begin here."""
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
