"""MissingEnd: the end of a job whose log does not have it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    JobState,
    Usage,
)
from shared.transport.ports.jobs import MAX_BLIND_S, JobLook, JobRecord, JobStore, Restored

log = logging.getLogger(__name__)


class MissingEnd:
    """Finds it for one reader: the job's record is gone, or outlived the log.

    The store may have lost the job in an outage. Its worker may put it back for a while; a job of
    which the reader has nothing yet is submitted again.
    """

    def __init__(
        self,
        job_id: str,
        store: JobStore,
        resubmit: Callable[[], Awaitable[Restored]] | None,
        patience_s: float,
    ) -> None:
        """Takes `resubmit` of EventRelay.open. `patience_s`: how long a worker has to put a lost
        job back."""
        self._job_id = job_id
        self._store = store
        self._resubmit = resubmit
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._missing_since_s: float | None = None  # since when the store has no such job
        self._seen_s = self._clock()  # when the store had the job last
        self._is_over = False  # by the store: the job is gone, or has ended

    def look(self, found: JobLook | None) -> bool:
        """Returns whether the job is missing or has ended, by the store's record."""
        if found is not None:
            self.seen()
        self._is_over = found is None or found.state in TERMINAL_STATES
        return self._is_over

    def seen(self) -> None:
        """Records that the store has the job."""
        self._missing_since_s, self._seen_s = None, self._clock()

    def restart_patience(self) -> None:
        """Restarts the wait for a worker, which could not reach the store either."""
        self._missing_since_s = None

    async def end(self, cursor: Cursor, place: Cursor) -> Finished | Failed | None:
        """Returns the end of a job that is over for a reader at `cursor`, None while there may be
        another. `place`: where that is in the log.

        After a TransportError it is called again.
        """
        if not self._is_over:
            return None
        record = await self._store.get(self._job_id)
        if record is None:
            end: Finished | Failed | None = await self._end_of_lost(cursor)
        else:
            end = await self._end_of_known(record, cursor, place)
        self._is_over = False
        return end

    async def _end_of_lost(self, cursor: Cursor) -> Failed | None:
        resubmitted = await self._submitted_again(cursor)
        if resubmitted is Restored.RESTORED:
            return None
        if resubmitted is None and not self._has_been_missing():
            return None  # its worker may put it back until a later look
        message = "The job is no longer known: its record was lost."
        usage = Usage(0, cursor.num_tokens)
        return Failed(cursor, JobState.FAILED, ErrorCode.JOB_LOST, message, usage)

    def _has_been_missing(self) -> bool:
        """Returns whether it has been missing for longer than a worker takes to put it back."""
        now_s = self._clock()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return now_s - self._missing_since_s >= self._patience_s

    async def _end_of_known(
        self, record: JobRecord, cursor: Cursor, place: Cursor
    ) -> Finished | Failed | None:
        self.seen()
        if record.state not in TERMINAL_STATES:
            return None
        if await self._store.read_log(self._job_id, place, 1):
            return None  # it ended between the two looks; the next read has all
        return _end_of_record(record, cursor)

    async def _submitted_again(self, cursor: Cursor) -> Restored | None:
        """Submits a job again that the store lost before its reader got anything.

        Returns None where this reader cannot, or has not seen the job for so long that it may have
        ended.
        """
        if self._resubmit is None or cursor != START:
            return None
        if self._clock() - self._seen_s > MAX_BLIND_S:
            return None
        restored = await self._resubmit()
        if restored is Restored.RESTORED:
            self.seen()
            log.warning(
                "resubmitted a job that Redis had lost, for its reader",
                extra={"job_id": self._job_id},
            )
        return restored


def _end_of_record(record: JobRecord, cursor: Cursor) -> Finished | Failed:
    usage = Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
    if record.state is JobState.FINISHED and record.completion_tokens == cursor.num_tokens:
        reason = FinishReason(record.reason or FinishReason.STOP)
        return Finished(cursor, reason, usage, record.stop_reason, record.ended_ms)
    if record.state is JobState.FINISHED:
        message = (
            "The job has finished, but its log does not reach this point: it cannot be resumed "
            "from here."
        )
        return Failed(cursor, JobState.FAILED, ErrorCode.JOB_LOST, message, usage)
    return Failed(
        end=cursor,
        state=record.state,
        code=record.reason or record.state.value,
        message=record.message or "",
        usage=usage,
    )
