"""The jobs behind the answers: look, list, cancel, read along."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.errors import MAX_ECHO_CHARS, CallerError, job_not_found, unsupported
from api.frontend import Frontend, frontend_of
from api.job_view import job_payload, parse_status
from api.json_answer import json_answer
from api.public_id import parse_job_id
from api.tailing import TailResponse
from shared.messages import START, TERMINAL_STATES, Cursor, InvalidParameter
from shared.transport.base import JobRecord

router = APIRouter()

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


@router.get("/v1/jobs")
async def list_jobs(request: Request) -> Response:
    """Newest first. `state`: one of the status words; `limit`: 1 to 1000, 20 by default."""
    query = request.query_params
    for name in query:
        if name not in ("state", "limit"):
            raise unsupported(name[:MAX_ECHO_CHARS], "it is not known here")
    state = parse_status(query["state"]) if "state" in query else None
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    records = await frontend_of(request).store.list_jobs(state, limit)
    return json_answer({"object": "list", "data": [job_payload(record) for record in records]})


@router.get("/v1/jobs/{name}")
async def get_job(request: Request, name: str) -> Response:
    """State, queue position, timings, token counts, worker and finish reason."""
    _, record = await _find(frontend_of(request), name)
    return json_answer(job_payload(record))


@router.delete("/v1/jobs/{name}")
@router.post("/v1/jobs/{name}/cancel")
async def cancel_job(request: Request, name: str) -> Response:
    """Cancels in every state; the answer is the job as it ended, whoever was first. Idempotent."""
    frontend = frontend_of(request)
    job_id = parse_job_id(name)
    result = None if job_id is None else await frontend.store.cancel(job_id, "cancelled")
    if job_id is None or result is None:
        raise job_not_found(name)
    if result.won:
        frontend.metrics.cancels_by_request += 1
    _, record = await _find(frontend, name)
    return json_answer(job_payload(record))


@router.get("/v1/jobs/{name}/stream")
async def stream_job(request: Request, name: str) -> Response:
    """The job's text from `Last-Event-ID` (or `?after=`) on; 204 when nothing is left to tell."""
    frontend = frontend_of(request)
    after = _after(request)
    _, record = await _find(frontend, name)
    if record.state in TERMINAL_STATES and after.num_tokens > record.completion_tokens:
        return Response(status_code=204)
    return TailResponse(frontend, record, after)


async def _find(frontend: Frontend, name: str) -> tuple[str, JobRecord]:
    job_id = parse_job_id(name)
    record = None if job_id is None else await frontend.store.get(job_id)
    if job_id is None or record is None:
        raise job_not_found(name)
    return job_id, record


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidParameter("limit", f"must be between 1 and {MAX_LIMIT}")
    return limit


def _after(request: Request) -> Cursor:
    # A browser's EventSource sets the header when it comes back, but cannot on its first try.
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    if not text:
        return START
    try:
        return Cursor.parse(text)
    except ValueError:
        raise CallerError(
            "Invalid value for 'Last-Event-ID': must be an id of this stream.",
            param="Last-Event-ID",
        ) from None
