"""Routes of a job's text as a durable stream: read it, follow it, ask how far it is."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.http import sse
from api.http.caller import CallerDep
from api.http.openapi import KEPT, Absent, errors, statuses
from api.jobs.attached_job import AttachedJob
from api.jobs.durable_stream import (
    Chunk,
    TextEvents,
    chunk_events,
    cursor_of,
    next_interval,
    offset_of,
    read_chunk,
    wait_for_chunk,
)
from api.jobs.routes import find_job
from api.jobs.service import JobsDep, JobService
from api.jobs.stream_response import EventStreamBody, StreamResponse
from api.request_errors import ClientError, job_not_found
from shared.messages import TERMINAL_STATES
from shared.transport.ports.jobs import JobRecord

router = APIRouter(tags=["Jobs"])

TEXT = "text/plain; charset=utf-8"
# A browser that shows pages of others reads it by fetch alone.
_SAFE = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "cross-origin"}
_EVENTS = {**_SAFE, "content-type": "text/event-stream"}  # some clients compare it as a whole


@router.head("/v1/jobs/{name}/text", response_class=Response, responses=statuses(KEPT))
async def head_job_text(name: str, caller: CallerDep, jobs: JobsDep) -> Response:
    """Returns the stream's last offset, and whether it is closed."""
    record = await _find(jobs, caller, name)
    (look,) = await jobs.store.look([record.job_id])
    if look is None:
        raise job_not_found(name)
    status = look.state if look.state in TERMINAL_STATES else None
    headers = _headers(Chunk(look.end, look.end, status=status)) | {"cache-control": "no-store"}
    del headers["stream-up-to-date"]
    return Response(headers=headers, media_type=None)


@router.get(
    "/v1/jobs/{name}/text",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}, "text/event-stream": {}}},
        204: {},
        304: {},
        **errors(KEPT),
    },
)
async def read_job_text(
    name: str,
    request: Request,
    caller: CallerDep,
    jobs: JobsDep,
    offset: str | Absent = None,
    live: Literal["long-poll", "sse"] | Absent = None,
    cursor: str | Absent = None,
) -> Response:
    """Reads the job's text as a durable stream: from an offset on, live where `live` is set."""
    given = request.query_params.getlist("offset")
    if len(given) > 1 or given == [""] or (live and not given):
        raise ClientError("Exactly one 'offset' is required here.", param="offset")
    record = await _find(jobs, caller, name)
    chunk = await _chunk(jobs, record, offset or "-1")
    interval = next_interval(cursor or "")
    if live == "sse":
        return _events(jobs, record, chunk, interval)
    if live and not chunk.text and not chunk.is_closed:
        chunk = await wait_for_chunk(jobs, record, chunk.end, request.scope)
    headers = _headers(chunk) | ({"stream-cursor": interval} if live else {})
    if live and not chunk.text:
        return Response(status_code=204, headers=headers | {"cache-control": "no-store"})
    if offset == "now":
        return Response(chunk.text, headers=headers | {"cache-control": "no-store"})
    etag = f'"{record.job_id}:{chunk.etag}"'
    age = "private, max-age=60, stale-while-revalidate=300" if chunk.text else "no-store"
    headers |= {"etag": etag, "cache-control": age}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(chunk.text, headers=headers)


async def _find(jobs: JobService, caller: CallerDep, name: str) -> JobRecord:
    """Raises ClientError also for a job with several texts."""
    record = await find_job(jobs, caller, name)
    if record.num_choices > 1:
        raise ClientError(
            f"This job has several choices: '/v1/jobs/{name}/stream' streams them.", param="name"
        )
    return record


async def _chunk(jobs: JobService, record: JobRecord, offset: str) -> Chunk:
    if offset != "now":
        return await read_chunk(jobs.store, record, cursor_of(offset))
    (look,) = await jobs.store.look([record.job_id])
    if look is None:
        raise job_not_found(record.job_id)
    status = look.state if look.state in TERMINAL_STATES else None
    return Chunk(look.end, look.end, status=status)


def _headers(chunk: Chunk) -> dict[str, str]:
    headers = {**_SAFE, "content-type": TEXT, "stream-next-offset": offset_of(chunk.end)}
    if chunk.is_up_to_date:
        headers["stream-up-to-date"] = "true"
    if chunk.status is not None:
        headers |= {"stream-closed": "true", "penstock-job-status": chunk.status.value}
    return headers


def _events(jobs: JobService, record: JobRecord, chunk: Chunk, interval: str) -> Response:
    """Returns the response that streams the text after `chunk` as well."""
    if chunk.is_closed:
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        return Response(chunk_events(chunk, interval), headers=headers | _EVENTS)
    source = AttachedJob(jobs, record, chunk.end, has_short_end=True)
    body = EventStreamBody(jobs, TextEvents(chunk, interval))
    return _Safe(StreamResponse(jobs, source, body))


class _Safe(Response):
    """A stream with the headers of _EVENTS."""

    def __init__(self, response: StreamResponse) -> None:
        super().__init__()
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_EVENTS)
            await send(message)

        await self._response(scope, receive, send_safe)
