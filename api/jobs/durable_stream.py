"""A job's text as a read-only stream of the Durable Streams protocol.

An offset is a cursor of the job's log whose numbers have 16 digits, so that offsets sort as texts.
Reads are from the log; a long poll and server-sent events continue with the relay. The job's end
closes the stream: `Penstock-Job-Status` has the job's state.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from starlette.types import Scope

from api.errors import ApiError, unavailable
from api.http import sse
from api.jobs.attached_job import AttachedJob
from api.jobs.event_stream import StreamInterrupted
from api.jobs.log_page import check_expiry
from api.jobs.service import JobService
from api.request_errors import ClientError
from shared.messages import (
    START,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    JobState,
    PromptSlice,
)
from shared.transport.ports.jobs import JobRecord, JobStore

PAGE_EVENTS = 256
CHUNK_BYTES = 1 << 20  # after which no further page is read
LONG_POLL_S = 20.0
CURSOR_S = 20  # of an interval: requests in it may be collapsed by caches
CURSOR_EPOCH_S = 1_728_432_000  # 9 October 2024
_OFFSET = re.compile(r"([0-9]{16})_([0-9]{16})")
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a stream from `start` to `end`. `status`: the job's, where `end` is its end."""

    start: Cursor
    end: Cursor
    text: bytes = b""
    is_up_to_date: bool = True
    status: JobState | None = None

    @property
    def is_closed(self) -> bool:
        return self.status is not None

    @property
    def etag(self) -> str:
        """Names the bytes within a job, and whether more can follow."""
        return f"{offset_of(self.start)}:{offset_of(self.end)}{':c' if self.is_closed else ''}"


def offset_of(cursor: Cursor) -> str:
    """Returns the offset of a place."""
    return f"{cursor.num_tokens:016d}_{cursor.num_bytes:016d}"


def cursor_of(offset: str) -> Cursor:
    """Returns the place of an offset; "-1" is the begin. Raises ClientError."""
    if offset == "-1":
        return START
    if (found := _OFFSET.fullmatch(offset)) is None:
        raise bad_offset()
    return Cursor(int(found[1]), int(found[2]))


def bad_offset() -> ClientError:
    """Returns the error of an offset that this stream did not give."""
    return ClientError(
        "Invalid value for 'offset': must be an offset of this stream.", param="offset"
    )


def next_interval(cursor: str) -> str:
    """Returns the number of this interval, or a greater one than the client's where it has that
    already: no cached answer is then repeated to it."""
    now = (int(time.time()) - CURSOR_EPOCH_S) // CURSOR_S
    given = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18 else -1
    return str(now if given < now else given + random.randint(1, 180))


async def read_chunk(store: JobStore, record: JobRecord, after: Cursor) -> Chunk:
    """Returns the text of the log from `after` to its end or some CHUNK_BYTES. Raises ClientError
    for a place that is not in the log or whose text has expired, and TransportError."""
    since = end = after
    text = bytearray()
    while True:
        events = await store.read_log(record.job_id, since, PAGE_EVENTS)
        for event in events:
            if isinstance(event, PromptSlice):
                since = Cursor(0, event.index + 1)
            elif isinstance(event, Delta):
                if not _holds(event, end):
                    raise bad_offset()
                text += event.text.encode()[end.num_bytes - event.start.num_bytes :]
                since = end = event.end
            elif isinstance(event, Finished | Failed):
                _check_end(event, record, end)
                return Chunk(after, end, bytes(text), status=_status(event))
        if len(events) < PAGE_EVENTS or len(text) >= CHUNK_BYTES:
            return Chunk(after, end, bytes(text), is_up_to_date=len(events) < PAGE_EVENTS)


def _holds(delta: Delta, place: Cursor) -> bool:
    """Returns whether a place is in a delta or at one of its ends."""
    start, end = delta.start, delta.end
    is_behind = place.num_tokens >= start.num_tokens and place.num_bytes >= start.num_bytes
    return is_behind and place.num_tokens <= end.num_tokens and place.num_bytes <= end.num_bytes


def _check_end(event: Finished | Failed, record: JobRecord, end: Cursor) -> None:
    """Raises ClientError where the end does not follow `end` in the log."""
    check_expiry(event, record)
    if isinstance(event, Failed) and event.code == ErrorCode.JOB_LOST != record.reason:
        raise ClientError("The job's text was lost.", status=410, code="gone", param="name")
    if isinstance(event, Finished) and event.end != end:
        raise bad_offset()


def _status(event: Finished | Failed) -> JobState:
    return JobState.FINISHED if isinstance(event, Finished) else event.state


async def wait_for_chunk(jobs: JobService, record: JobRecord, after: Cursor, scope: Scope) -> Chunk:
    """Returns the next text from `after`, or that none came in LONG_POLL_S. Raises
    ApiError."""
    source = AttachedJob(jobs, record, after)
    deadline_s = time.monotonic() + LONG_POLL_S
    end = after
    try:
        stream = await source.open(scope)
        while (left_s := deadline_s - time.monotonic()) > 0:
            event = await stream.get(left_s)
            if isinstance(event, Delta):
                end = event.end
                if event.text:
                    return Chunk(after, end, event.text.encode())
            elif event is not None:
                source.observe_end(event)
                return Chunk(after, end, status=_status(event))
        return Chunk(after, end)
    except StreamInterrupted as error:
        raise unavailable("The job store is unavailable. Read on from the same offset.") from error
    finally:
        await source.close(None, is_resumable=True)


class TextEvents:
    """The stream as server-sent events: each `data` has a `control` after it, with the offset.

    `begun`: the part of the log that was read before the response started.
    """

    framing = sse.Framing(sse.event, sse.event_pieces, b"", sse.KEEPALIVE, sse.BEHIND_KEEPALIVE)
    has_ids = False

    def __init__(self, begun: Chunk, cursor: str) -> None:
        self._begun = begun
        self._cursor = cursor
        self._end = self._sent = begun.end
        self._is_in_line_end = begun.text.endswith(b"\r")

    def opening(self) -> Iterator[bytes]:
        yield chunk_events(self._begun, self._cursor)

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        text = delta.text.encode()
        if text:
            is_second_half = self._is_in_line_end and text.startswith(b"\n")
            self._is_in_line_end = text.endswith(b"\r")
            text = text[1:] if is_second_half else text
        chunk = Chunk(self._end, delta.end, text, is_up_to_date=not num_waiting)
        self._end = delta.end
        yield chunk_events(chunk, self._cursor) if delta.text else b""

    def ending(self, end: Finished | Failed, *, is_small: bool) -> Iterator[bytes]:
        yield chunk_events(Chunk(self._end, self._end, status=_status(end)), self._cursor)

    def failed(self, error: ApiError) -> bytes:
        """Returns an event that clients pass over: they read on from their offset."""
        return b"event: error\n" + sse.event(error.body())

    def mark_sent(self) -> None:
        self._sent = self._end

    def resume_hint(self, job_id: str) -> str:
        return f"Read on from offset {offset_of(self._sent)}."


def chunk_events(chunk: Chunk, cursor: str) -> bytes:
    """Returns a chunk as its events. A line end of any kind begins a new line of data.

    As the protocol writes them: without a space after `data:`, but before one that is text.
    """
    control: dict[str, str | bool] = {"streamNextOffset": offset_of(chunk.end)}
    if chunk.status is not None:
        control |= {"streamClosed": True, "jobStatus": chunk.status.value}
    else:
        control["streamCursor"] = cursor
    if chunk.is_up_to_date:
        control["upToDate"] = True
    lines = b"".join(
        (b"data: " if line.startswith(b" ") else b"data:") + line + b"\n"
        for line in _LINE_END.split(chunk.text)
    )
    data = b"event: data\n" + lines + b"\n" if chunk.text else b""
    return data + b"event: control\ndata:" + msgspec.json.encode(control) + b"\n\n"
