"""The jobs behind the answers: look, list, cancel, read along."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.auth.stream_tokens import StreamTokensDep
from api.errors import (
    ClientError,
    job_not_found,
    unknown_parameter,
)
from api.http.caller import Caller, CallerDep
from api.http.json_response import json_response
from api.http.openapi import NAMED, STORE, errors, header, limit, parameters, query, streamed
from api.ids import parse_job_id, public_id
from api.jobs.protocol import JobAnswer, JobList, StreamToken, job_payload, parse_status
from api.jobs.resume_point import ResumePoint
from api.jobs.service import JobsDep, JobService
from api.jobs.tail import tail_response
from shared.messages import TERMINAL_STATES, InvalidParameter, JobState
from shared.transport.ports.jobs import JobRecord

router = APIRouter(tags=["Jobs"])

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
_CURSOR = {"type": "string", "pattern": "^[0-9]{1,19}-[0-9]{1,19}$"}


@router.get(
    "/v1/jobs",
    response_model=JobList,
    responses=errors(STORE),
    openapi_extra=parameters(
        query("state", {"type": "string", "enum": list(JobState)}), limit(DEFAULT_LIMIT, MAX_LIMIT)
    ),
)
async def list_jobs(request: Request, caller: CallerDep, jobs: JobsDep) -> Response:
    """Newest first. `state`: one of the status words; `limit`: 1 to 1000, 20 by default."""
    params = request.query_params
    for name in params:
        if name not in ("state", "limit"):
            raise unknown_parameter(name)
    state = parse_status(params["state"]) if "state" in params else None
    length = list_limit(params.get("limit", str(DEFAULT_LIMIT)))
    records = await jobs.store.list_jobs(state, length, caller.scope)
    return json_response({"object": "list", "data": [job_payload(record) for record in records]})


@router.get("/v1/jobs/{name}", response_model=JobAnswer, responses=errors(NAMED))
async def get_job(name: str, caller: CallerDep, jobs: JobsDep) -> Response:
    """State, queue position, timings, token counts, worker and finish reason."""
    return json_response(job_payload(await _find(jobs, caller, name)))


@router.delete(
    "/v1/jobs/{name}",
    response_model=JobAnswer,
    responses=errors(NAMED),
    operation_id="cancel_job_delete",
)
@router.post(
    "/v1/jobs/{name}/cancel",
    response_model=JobAnswer,
    responses=errors(NAMED),
    operation_id="cancel_job_post",
)
async def cancel_job(name: str, caller: CallerDep, jobs: JobsDep) -> Response:
    """Cancels a job in any state. Returns the job as it ended. Idempotent."""
    record = await _find(jobs, caller, name)
    if not await jobs.cancel(record.job_id):
        raise job_not_found(name)
    return json_response(job_payload(await _find(jobs, caller, name)))


@router.get(
    "/v1/jobs/{name}/stream",
    response_class=Response,
    responses=streamed(NAMED) | {204: {"description": "The job has ended and all of it was read."}},
    openapi_extra=parameters(
        query("after", _CURSOR, "The id of the last event that was read."),
        header("last-event-id", _CURSOR, "As `after`, which it overrides."),
        query("token", {"type": "string"}, "In place of a key: of `stream-token`."),
    ),
)
async def stream_job(request: Request, name: str, caller: CallerDep, jobs: JobsDep) -> Response:
    """The job's text from `Last-Event-ID` (or `?after=`) on; 204 when nothing is left to send."""
    after = _after(request)
    record = await _find(jobs, caller, name)
    if record.state in TERMINAL_STATES and after.cursor.num_tokens > record.completion_tokens:
        return Response(status_code=204)
    return tail_response(jobs, record, after)


@router.post("/v1/jobs/{name}/stream-token", response_model=StreamToken, responses=errors(NAMED))
async def new_stream_token(
    name: str, caller: CallerDep, jobs: JobsDep, tokens: StreamTokensDep
) -> Response:
    """A token for the URL of the job's stream, for readers that cannot send a key: `?token=`.

    It opens this stream and nothing else, for a while: `expires_at`, in Unix seconds.
    """
    record = await _find(jobs, caller, name)
    token, ends_s = await tokens.new(record.job_id, record.tenant)
    url = f"/v1/jobs/{public_id(record.kind, record.job_id)}/stream?token={token}"
    return json_response(
        {"object": "stream_token", "token": token, "url": url, "expires_at": ends_s}
    )


async def _find(jobs: JobService, caller: Caller, name: str) -> JobRecord:
    """Raises 404 also for another tenant's job, to hide that it exists."""
    job_id = parse_job_id(name)
    record = None if job_id is None else await jobs.store.get(job_id)
    if record is None or not caller.sees(record.tenant):
        raise job_not_found(name)
    return record


def list_limit(text: str) -> int:
    """Raises InvalidParameter("limit", ...)."""
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidParameter("limit", f"must be between 1 and {MAX_LIMIT}")
    return limit


def _after(request: Request) -> ResumePoint:
    # A browser's EventSource sets the header when it comes back, but cannot on its first try.
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    if not text:
        return ResumePoint()
    try:
        return ResumePoint.parse(text)
    except ValueError:
        raise ClientError(
            "Invalid value for 'Last-Event-ID': must be an id of this stream.",
            param="Last-Event-ID",
        ) from None
