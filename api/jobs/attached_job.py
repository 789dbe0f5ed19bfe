"""AttachedJob: a job that exists already as the source of a response's events."""

from __future__ import annotations

import anyio
from starlette.types import Scope

from api.errors import store_unreachable
from api.http.open_requests import Ending
from api.jobs.event_stream import JobStream
from api.jobs.service import JobService
from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    Delta,
    Failed,
    Finished,
    OnDisconnect,
)
from shared.transport.ports.jobs import JobRecord, TransportError


class AttachedJob:
    """A source that follows a job that was submitted before, from a cursor of its log on.

    Leaving it cancels nothing. But it is a reader of the job: while it is there the job is no
    orphan, and where the last reader's leaving begins a grace period, its leaving does too.
    """

    has_long_events = True
    resume_hint: str | None = None

    def __init__(
        self,
        jobs: JobService,
        record: JobRecord,
        after: Cursor = START,
        *,
        has_short_end: bool = False,
    ) -> None:
        """Takes the job's record. `has_short_end`: the last event does not repeat the output."""
        self._has_short_end = has_short_end
        self.job_id = record.job_id
        self._jobs = jobs
        self._after = after
        self._policy = record.on_disconnect
        self._is_live = record.state not in TERMINAL_STATES
        self._reader_id = jobs.new_reader_id()
        self._stream: JobStream | None = None
        self._has_ended = False

    async def open(self, scope: Scope) -> JobStream:
        jobs, reader = self._jobs, (self.job_id, self._reader_id)
        try:
            if self._is_live:
                await jobs.store.attach([reader])
                jobs.disconnects.watch(*reader, self._policy)
            self._stream = await jobs.relay.open(self.job_id, self._after)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close(None, is_resumable=True)
            if isinstance(error, TransportError):
                raise store_unreachable(error) from error
            raise
        return self._stream

    def observe(self, delta: Delta) -> None:
        """Does nothing: the response that submitted the job counts it."""

    def observe_end(self, end: Finished | Failed) -> None:
        self._has_ended = True

    def is_small(self, end: Finished | Failed) -> bool:
        return self._has_short_end

    async def close(self, ending: Ending | None, *, is_resumable: bool) -> None:
        disconnects = self._jobs.disconnects
        disconnects.unwatch(self._reader_id)
        has_grace = self._is_live and self._policy is OnDisconnect.GRACE
        if has_grace and not self._has_ended and ending is not Ending.CUT:
            await disconnects.left(self.job_id, self._reader_id, OnDisconnect.GRACE)
        if self._stream is not None:
            await self._stream.aclose()
