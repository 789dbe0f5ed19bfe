"""missing_end: finds the end of a job whose log does not have it."""

from __future__ import annotations

import asyncio
import logging

from api.jobs.event_stream import Presence
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
from shared.transport.ports.jobs import MAX_BLIND_S, JobRecord, JobStore, Restored

log = logging.getLogger(__name__)


async def missing_end(
    job_id: str, store: JobStore, presence: Presence, cursor: Cursor, place: Cursor
) -> Finished | Failed | None:
    """Returns the end of a job for a reader at `cursor`, None while there may be another. `place`:
    where that is in the log.

    The job's record is gone, or outlived the log. The store may have lost the job in an outage. Its
    worker may put it back for a while; a job of which the reader has nothing yet is submitted
    again. Raises TransportError; then it is called again.
    """
    record = await store.get(job_id)
    if record is None:
        return await _end_of_lost(job_id, presence, cursor)
    presence.seen(_now_s())
    if record.state not in TERMINAL_STATES:
        return None
    if await store.read_log(job_id, place, 1):
        return None  # it ended between the two looks; the next read has all
    return _end_of_record(record, cursor)


async def _end_of_lost(job_id: str, presence: Presence, cursor: Cursor) -> Failed | None:
    resubmitted = await _submitted_again(job_id, presence, cursor)
    if resubmitted is Restored.RESTORED:
        return None
    if resubmitted is None and not _has_been_missing(presence):
        return None  # its worker may put it back until a later look
    message = "The job is no longer known: its record was lost."
    usage = Usage(0, cursor.num_tokens)
    return Failed(cursor, JobState.FAILED, ErrorCode.JOB_LOST, message, usage)


def _has_been_missing(presence: Presence) -> bool:
    """Returns whether it has been missing for longer than a worker takes to put it back."""
    now_s = _now_s()
    if presence.missing_since_s is None:
        presence.missing_since_s = now_s
    return now_s - presence.missing_since_s >= presence.patience_s


async def _submitted_again(job_id: str, presence: Presence, cursor: Cursor) -> Restored | None:
    """Submits a job again that the store lost before its reader got anything.

    Returns None where this reader cannot, or has not seen the job for so long that it may have
    ended.
    """
    if presence.resubmit is None or cursor != START:
        return None
    if _now_s() - presence.seen_s > MAX_BLIND_S:
        return None
    restored = await presence.resubmit()
    if restored is Restored.RESTORED:
        presence.seen(_now_s())
        log.warning(
            "resubmitted a job that Redis had lost, for its reader", extra={"job_id": job_id}
        )
    return restored


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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
