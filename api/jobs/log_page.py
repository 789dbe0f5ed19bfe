"""A page of a job's log, for operators."""

from __future__ import annotations

from api.jobs.event_stream import FIRST_PAGE_EVENTS, next_page
from api.jobs.protocol import LogEvent, LogPage
from api.request_errors import job_expired
from shared.messages import Cursor, Delta, ErrorCode, Failed, Finished, JobEvent
from shared.transport.ports.jobs import JobRecord, JobStore


async def read_log_page(store: JobStore, record: JobRecord, after: Cursor, limit: int) -> LogPage:
    """Returns at most `limit` events strictly after `after`. Raises ClientError (410) where they
    have expired, and TransportError.

    It reads few entries at a time, which may be long ones: at most one such page is held, and of
    each event no more than the part shown.
    """
    found: list[LogEvent] = []
    num_events = FIRST_PAGE_EVENTS
    while len(found) < limit:
        count = min(num_events, limit - len(found))
        events = await store.read_log(record.job_id, after, count)
        for event in events:
            check_expiry(event, record)
        if any(is_missing_text(event, record) for event in events):
            return LogPage(data=found, has_more=False, has_expired=True)
        # After the end there is the end again.
        found += (shown for shown in map(LogEvent.of, events) if shown.id != str(after))
        if len(events) < count or isinstance(events[-1], Finished | Failed):
            return LogPage(data=found, has_more=False, has_expired=False)
        after, num_events = Cursor.parse(found[-1].id), next_page(events)
    return LogPage(data=found, has_more=True, has_expired=False)


def check_expiry(event: Delta | JobEvent, record: JobRecord) -> None:
    """Raises ClientError (410) where the log has expired."""
    if isinstance(event, Failed) and event.code == ErrorCode.JOB_EXPIRED != record.reason:
        raise job_expired(event.message)


def is_missing_text(event: Delta | JobEvent, record: JobRecord) -> bool:
    """Returns whether the event replaces a text that has expired or was lost."""
    codes = (ErrorCode.JOB_EXPIRED, ErrorCode.JOB_LOST)
    return isinstance(event, Failed) and event.code in codes and event.code != record.reason
