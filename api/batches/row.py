"""RowRun: one row of a batch from its line to the line that answers it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from dataclasses import fields, replace
from typing import Any

from api.auth.caller import Caller
from api.batches.input import Row
from api.batches.lease import Stop
from api.batches.results import RowResult, answer_pieces, expiry_line, refusal_line
from api.batches.row_room import RowRoom
from api.errors import ApiError, ServerError, UnavailableError, invalid_parameter, job_failed
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.prompt_logprobs import ScoredPrompt
from api.generation.thread_pool import request_bytes
from api.ids import public_id
from api.jobs.delta_parts import parts_of
from api.jobs.event_stream import JobStream, StreamInterrupted
from api.jobs.new_job import Prepared
from shared.keys import NUM_LANES
from shared.messages import (
    START,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    InvalidParameter,
    Job,
    JobState,
    OnDisconnect,
)
from shared.transport.ports.jobs import AdmissionLimits, QueueFull, Restored, TransportError

log = logging.getLogger(__name__)

LANE = NUM_LANES - 1  # everything interactive goes first
LOOK_S = 1.0  # between looks at whether the batch is to stop
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0
MAX_LIVES = 3  # jobs of one row that the store may lose
_LOST = frozenset({ErrorCode.JOB_LOST, ErrorCode.STREAM_DIVERGED})


class RowRun:
    """One row. `job_id` follows from the batch and the line, so whoever runs the row again finds
    the job that is there."""

    def __init__(
        self, room: RowRoom, row: Row, line: int, job_id: str, *, may_be_there: bool
    ) -> None:
        self._room = room
        self._row = row
        self._line = line
        self._job_id = job_id
        self._request_id = public_id(room.endpoint.kind, job_id)
        self._may_be_there = may_be_there  # an earlier owner may have submitted it
        self._ignored: str | None = None  # members of it, once it was parsed

    async def run(self) -> RowResult:
        """Never raises but CancelledError."""
        try:
            return await self._run()
        except ApiError as error:
            return self._refused(error)
        except InvalidParameter as error:
            return self._refused(invalid_parameter(error))
        except Exception:
            log.exception("row failed", extra={"job_id": self._job_id})
            return self._refused(ServerError("The server made a mistake. It has been logged."))

    def expired(self) -> RowResult:
        """The batch has no time left, and nobody has begun this row."""
        text = expiry_line(self._row.custom_id, self._job_id)
        return RowResult(self._line, self._job_id, text)

    async def _run(self) -> RowResult:
        for life in itertools.count(1):
            prepared = await self._prepared()
            if prepared is None:
                return await self._given_up()
            end = await self._answered(prepared)
            if end is None:
                return self._unanswered()
            if isinstance(end, Finished):
                body = prepared.dialect.whole(end)
                line = answer_pieces(
                    self._row.custom_id, self._job_id, self._request_id, body, self._ignored
                )
                text = await self._room.services.slices.joined(line)
                return RowResult(self._line, self._job_id, text, True, end.usage)
            if end.code not in _LOST or life == MAX_LIVES:
                return self._failed(end)
            log.warning("row begins anew", extra={"job_id": self._job_id, "reason": end.code})
        raise AssertionError("unreachable")

    async def _prepared(self) -> Prepared | None:
        """None when the batch stops before this can be done. Raises ApiError, InvalidParameter."""
        room, retry_s = self._room, FIRST_RETRY_S
        client_id = _shown(self._row.custom_id)
        caller = Caller(self._request_id, self._job_id, client_id, room.tenant)
        while True:
            try:
                async with room.preparing:
                    request_bytes.set(len(self._row.body))  # earlier turns are added to it
                    request = await self._parsed()
                    return await room.endpoint.prepare(room.services, caller, request)
            except (UnavailableError, TransportError):  # no worker lives, or the pool is full
                if room.stop.why is not None and not self._may_be_there:
                    return None
                if await room.stop.wait(_jittered(retry_s)):
                    return None
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _parsed(self) -> Any:
        """Returns the row's request. Raises ApiError, InvalidParameter."""
        services = self._room.services
        ignored = IgnoredMembers(refuse=services.settings.refuse_unused_members)
        try:
            return await services.pool.run(self._room.endpoint.parse, self._row.body, ignored)
        finally:
            self._ignored = ignored.text

    async def _answered(self, prepared: Prepared) -> Finished | Failed | None:
        """The end of the row's job, all its text in the dialect; None: it has none to wait for."""
        stream = await self._submitted(prepared)
        while stream is not None:
            try:
                return await self._read(stream, prepared)
            except StreamInterrupted:
                stream = await self._opened(stream.cursor, prepared.prompt)
        return None

    async def _read(self, stream: JobStream, prepared: Prepared) -> Finished | Failed:
        is_cancelled = False
        try:
            while True:
                event = await stream.get(LOOK_S)
                if isinstance(event, Delta):
                    prepared.timing.token_came()
                    parts = parts_of(event)
                    await self._room.services.slices.run(map(prepared.dialect.collect, parts))
                elif event is not None:
                    return event
                if self._room.stop.why is not None and not is_cancelled:
                    is_cancelled = await self._cancel() is not None
        finally:
            await stream.aclose()

    async def _submitted(self, prepared: Prepared) -> JobStream | None:
        """None when the batch stops first, and no earlier owner had submitted it."""
        room, retry_s = self._room, FIRST_RETRY_S
        row = dataclasses.replace(
            prepared.job,
            lane=LANE,
            on_disconnect=OnDisconnect.CONTINUE,
            queue_timeout_ms=None,  # a row may wait until the batch expires
        )

        async def submit() -> None:
            prepared.timing.submitted_s = time.monotonic()
            job = dataclasses.replace(row, timeout_ms=max(1, room.time_left_ms()))
            await room.services.store.submit(job, self._limits(job), "")

        async def resubmit() -> Restored:
            return await room.services.store.submit_again(row, room.time_left_ms())

        async with room.submitting:
            while room.stop.why is None:
                try:
                    return await room.services.relay.open(
                        self._job_id, START, submit, resubmit, prepared.prompt
                    )
                except QueueFull as full:
                    delay_s = min(full.retry_after_s, MAX_RETRY_S)
                except TransportError:
                    delay_s = retry_s
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                    self._may_be_there = True  # a submit whose reply was lost
                await room.stop.wait(_jittered(delay_s))
        if not self._may_be_there or await self._cancel() is False:
            return None
        return await self._opened(START, prepared.prompt)

    def _limits(self, job: Job) -> AdmissionLimits:
        limits = self._room.services.admission.limits_of(job.tenant)
        return batch_share(limits, len(job.prompt_token_ids))

    async def _opened(self, after: Cursor, prompt: ScoredPrompt | None) -> JobStream:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._room.services.relay.open(self._job_id, after, prompt=prompt)
            except TransportError:
                await asyncio.sleep(_jittered(retry_s))
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _cancel(self) -> bool | None:
        """Whether there is such a job, which has ended then; None: the store cannot say."""
        try:
            result = await self._room.services.store.cancel(self._job_id, ErrorCode.CANCELLED)
        except TransportError:
            return None
        return result is not None

    async def _given_up(self) -> RowResult:
        """The batch stops, and this row cannot even be prepared."""
        if self._may_be_there:
            await self._cancel()
        return self._unanswered()

    def _unanswered(self) -> RowResult:
        """The batch stopped before the row had a result: an expired one says so of each."""
        if self._room.stop.why is Stop.EXPIRE:
            return self.expired()
        return RowResult(self._line, self._job_id)

    def _failed(self, end: Failed) -> RowResult:
        is_stopped = self._room.stop.why is not None and end.state is JobState.CANCELLED
        if is_stopped:
            return self._unanswered()
        if end.state is JobState.EXPIRED:  # its deadline is the batch's
            return self.expired()
        return self._refused(job_failed(end, delivered=False))

    def _refused(self, error: ApiError) -> RowResult:
        text = refusal_line(
            self._row.custom_id, self._job_id, self._request_id, error, self._ignored
        )
        return RowResult(self._line, self._job_id, text)


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.0)


def _shown(custom_id: str) -> str | None:
    """As what the caller calls the request, where it can stand in a log."""
    return custom_id if custom_id.isascii() and custom_id.isprintable() else None


# What batches may take of a limit: half of it, so that the other half is for those who wait.


def batch_share(limits: AdmissionLimits, prompt_tokens: int) -> AdmissionLimits:
    """Half of every bound; a tenant's share is then one of that half. A prompt that is larger than
    its share waits for an empty queue."""
    found = {field.name: getattr(limits, field.name) for field in fields(limits)}
    halves = {name: max(1, bound // 2) for name, bound in found.items() if isinstance(bound, int)}
    for name in ("max_queued_tokens", "max_queued_tokens_per_tenant"):
        if name in halves:
            halves[name] = max(halves[name], prompt_tokens)
    return replace(limits, **halves)
