"""Routes of jobs: look, list, cancel, stream; and of dead letters: list, run again, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException, Query
from starlette.responses import Response

from api.auth.stream_tokens import StreamTokensDep
from api.dependencies import provided
from api.errors import MAX_ECHO_CHARS
from api.generation.models import GenerationDep
from api.http.caller import Caller, CallerDep
from api.http.json_response import LongJsonResponse, json_response
from api.http.openapi import (
    EVENTS_HEADER,
    KEPT,
    NAMED,
    STORE,
    Absent,
    errors,
    parameters,
    streamed,
)
from api.http.time_slices import SlicesDep
from api.ids import parse_job_id, public_id
from api.jobs.log_page import check_expiry, read_log_page
from api.jobs.prefix import explain_prefix
from api.jobs.protocol import (
    DeadLetterDeleted,
    DeadLetterList,
    DeadLetterObject,
    DeadLetterQuery,
    JobEventsQuery,
    JobList,
    JobListQuery,
    JobObject,
    JobQuery,
    ListedJobs,
    LogPage,
    StreamToken,
)
from api.jobs.reader_position import ResumePoint
from api.jobs.service import JobsDep, JobService
from api.jobs.shown_text import (
    AnswerQuery,
    JobAnswer,
    JobPrompt,
    PromptQuery,
    read_answer,
    read_prompt,
)
from api.jobs.tail import tail_response
from api.request_errors import ClientError, dead_letter_not_found, job_expired, job_not_found
from shared.keys import new_job_id, partition_of
from shared.messages import START, TERMINAL_STATES, Cursor, OnDisconnect
from shared.transport.ports.dead_letters import DeadLetter, DeadLetters, Requeued
from shared.transport.ports.job_search import JobCursor, JobSearch
from shared.transport.ports.jobs import JobRecord
from shared.transport.ports.prompts import KeptPrompts
from shared.transport.wire import PayloadInvalid

router = APIRouter(tags=["Jobs"])

DeadLettersDep = Annotated[DeadLetters, provided(DeadLetters)]
SearchDep = Annotated[JobSearch, provided(JobSearch)]
KeptPromptsDep = Annotated[KeptPrompts, provided(KeptPrompts)]
_CURSOR = {"type": "string", "pattern": "^[0-9]{1,19}-[0-9]{1,19}$"}


@router.get("/v1/jobs", response_model=JobList, responses=errors(STORE))
async def list_jobs(
    params: Annotated[JobListQuery, Query()],
    caller: CallerDep,
    search: SearchDep,
    slices: SlicesDep,
    generation: GenerationDep,
) -> Response:
    """Lists jobs, newest first: live ones, then ended ones. A tenant's key lists the tenant's own.

    A page looks at a few thousand jobs at most; `next` continues from there."""
    after = None if params.after is None else JobCursor.parse(params.after)
    found = await search.find(params.wanted(caller), params.limit, after)
    known = generation.models.known
    page = JobList.model_construct(
        data=(JobObject.of(record, known) for record in found.records),
        **dict(ListedJobs.of(found)),
    )
    return LongJsonResponse(page, slices)


@router.get("/v1/jobs/{name}", response_model=JobObject, responses=errors(KEPT))
async def get_job(
    name: str,
    params: Annotated[JobQuery, Query()],
    caller: CallerDep,
    jobs: JobsDep,
    prompts: KeptPromptsDep,
    generation: GenerationDep,
) -> Response:
    """Returns a job's state, queue position, timings, token counts, worker and finish reason; with
    `prefix` also why its prompt was cached or not."""
    record = await find_job(jobs, caller, name)
    known = generation.models.known
    job = JobObject.of(record, known)
    if params.prefix:
        job.prefix = await explain_prefix(
            record, jobs.store, prompts, known.get(record.model), generation.pool
        )
    return json_response(job)


@router.delete(
    "/v1/jobs/{name}",
    response_model=JobObject,
    responses=errors(KEPT),
    operation_id="cancel_job_delete",
)
@router.post(
    "/v1/jobs/{name}/cancel",
    response_model=JobObject,
    responses=errors(KEPT),
    operation_id="cancel_job_post",
)
async def cancel_job(
    name: str, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Cancels a job in any state. Returns the job as it ended. Idempotent."""
    record = await find_job(jobs, caller, name)
    if await jobs.cancel(record.job_id) is None:
        raise job_not_found(name)
    return json_response(JobObject.of(await find_job(jobs, caller, name), generation.models.known))


async def _resume_point(
    last_event_id: Annotated[
        str | Absent,
        Header(json_schema_extra=_CURSOR),
    ] = None,
    after: Annotated[
        str | Absent,
        Query(json_schema_extra=_CURSOR),
    ] = None,
) -> ResumePoint:
    """Returns the offset to resume from. A browser's EventSource sets the header on reconnect,
    but cannot on its first try. Raises ClientError."""
    text = last_event_id or after
    if not text:
        return ResumePoint()
    try:
        return ResumePoint.parse(text)
    except ValueError:
        raise ClientError(
            "Invalid value for 'Last-Event-ID': must be an id of this stream.",
            param="Last-Event-ID",
        ) from None


@router.get(
    "/v1/jobs/{name}/stream",
    response_class=Response,
    responses=streamed(KEPT) | {204: {}},
    openapi_extra=parameters(("token", "query", {"type": "string"}), EVENTS_HEADER),
)
async def stream_job(
    name: str,
    after: Annotated[ResumePoint, Depends(_resume_point)],
    caller: CallerDep,
    jobs: JobsDep,
) -> Response:
    """Streams the job's text from `Last-Event-ID` (or `?after=`) on; 204 when nothing is left."""
    record = await find_job(jobs, caller, name)
    if record.state in TERMINAL_STATES and after.cursor.num_tokens > record.completion_tokens:
        return Response(status_code=204)
    await _check_text(jobs, record, after.cursor)
    return tail_response(jobs, record, after)


@router.get("/v1/jobs/{name}/events", response_model=LogPage, responses=errors(KEPT))
async def list_job_events(
    name: str, params: Annotated[JobEventsQuery, Query()], caller: CallerDep, jobs: JobsDep
) -> Response:
    """Returns a page of the job's log, oldest first, for as long as its text is stored."""
    record = await find_job(jobs, caller, name)
    after = START if params.after is None else Cursor.parse(params.after)
    page = await read_log_page(jobs.store, record, after, params.limit)
    return LongJsonResponse(page, jobs.slices)


@router.get("/v1/jobs/{name}/prompt", response_model=JobPrompt, responses=errors(KEPT))
async def get_job_prompt(
    name: str,
    params: Annotated[PromptQuery, Query()],
    caller: CallerDep,
    jobs: JobsDep,
    prompts: KeptPromptsDep,
    generation: GenerationDep,
) -> Response:
    """Returns a page of the job's prompt as text, as the model got it, while it is stored."""
    record = await find_job(jobs, caller, name)
    model = generation.models.known.get(record.model)
    return json_response(await read_prompt(record, params, prompts, model, generation.pool))


@router.get("/v1/jobs/{name}/answer", response_model=JobAnswer, responses=errors(KEPT))
async def get_job_answer(
    name: str,
    params: Annotated[AnswerQuery, Query()],
    caller: CallerDep,
    jobs: JobsDep,
    prompts: KeptPromptsDep,
    generation: GenerationDep,
) -> Response:
    """Returns the job's answer as far as it is: text, reasoning and tool calls of each choice.

    It makes the caller no reader of the job, so that `on_disconnect` does not see it.
    """
    record = await find_job(jobs, caller, name)
    model = generation.models.known.get(record.model)
    charge = jobs.answers.take(await jobs.store.stored_bytes(record.job_id))
    try:
        answer = await read_answer(
            record, params.limit, jobs.store, prompts, model, generation.pool, jobs.slices
        )
    except BaseException:
        charge.give()
        raise
    return LongJsonResponse(answer, jobs.slices, charge)


@router.post("/v1/jobs/{name}/stream-token", response_model=StreamToken, responses=errors(KEPT))
async def new_stream_token(
    name: str, caller: CallerDep, jobs: JobsDep, tokens: StreamTokensDep
) -> Response:
    """Returns a token for the URL of the job's stream, for clients that cannot send a key.

    `?token=` opens this stream and nothing else, until `expires_at` (Unix seconds).
    """
    record = await find_job(jobs, caller, name)
    token, ends_s = await tokens.new(record.job_id, record.tenant, caller.key_id)
    url = f"/v1/jobs/{public_id(record.kind, record.job_id)}/stream?token={token}"
    return json_response(StreamToken(token=token, url=url, expires_at=ends_s))


@router.get("/v1/dead-letters", response_model=DeadLetterList, responses=errors(STORE))
async def list_dead_letters(
    params: Annotated[DeadLetterQuery, Query()],
    caller: CallerDep,
    dead_letters: DeadLettersDep,
    slices: SlicesDep,
) -> Response:
    """Lists dead letters, newest first."""
    found = await dead_letters.list(caller.scope, params.limit)
    page = DeadLetterList.model_construct(data=map(DeadLetterObject.of, found))
    return LongJsonResponse(page, slices)


@router.delete("/v1/dead-letters/{name}", response_model=DeadLetterDeleted, responses=errors(NAMED))
async def delete_dead_letter(
    name: str, caller: CallerDep, dead_letters: DeadLettersDep
) -> Response:
    """Deletes the dead letter of this job, and its stored request."""
    dead_letter = await _find_dead_letter(dead_letters, caller, name)
    if isinstance(dead_letter, Requeued) or not await dead_letters.drop(dead_letter.job_id):
        raise dead_letter_not_found(name)
    return json_response(DeadLetterDeleted(id=public_id(dead_letter.kind, dead_letter.job_id)))


@router.post("/v1/jobs/{name}/requeue", response_model=JobObject, responses=errors(NAMED | {409}))
async def requeue_job(
    name: str,
    caller: CallerDep,
    jobs: JobsDep,
    dead_letters: DeadLettersDep,
    generation: GenerationDep,
) -> Response:
    """Runs a dead letter's job again: as a new job without a history and without a reader.

    Returns the new job. Idempotent: the job replaces the dead letter, and for a day the same
    request returns the same job.
    """
    dead_letter = await _find_dead_letter(dead_letters, caller, name)
    new_id = dead_letter.job_id
    if isinstance(dead_letter, DeadLetter):
        new_id = await requeue(jobs, dead_letters, name, dead_letter.job_id)
    record = await jobs.store.get(new_id)
    if record is None:
        raise job_not_found(new_id)
    return json_response(JobObject.of(record, generation.models.known))


async def requeue(jobs: JobService, dead_letters: DeadLetters, name: str, job_id: str) -> str:
    """Runs the job of a dead letter again. Returns the id of the new job. Raises ApiError."""
    try:
        kept = await dead_letters.request(job_id)
    except PayloadInvalid as error:
        raise _cannot_run(name, str(error)) from error
    if kept is None:
        raise _cannot_run(name, "Its request was not kept.")
    job = replace(
        kept,
        job_id=new_job_id(partition_of(job_id)),
        on_disconnect=OnDisconnect.CONTINUE,
        queue_timeout_ms=None,  # of the first job's reader
    )
    taken_by = await jobs.admission.requeue(job_id, job)
    if taken_by is None:  # deleted a moment ago
        raise dead_letter_not_found(name)
    return taken_by


async def find_job(jobs: JobService, caller: Caller, name: str) -> JobRecord:
    """Raises 404, also for another tenant's job, to hide that it exists; 410 for an expired one;
    405 for the name of a route that has other methods."""
    if name == "cancel":
        raise HTTPException(405)
    job_id = parse_job_id(name)
    record = None if job_id is None else await jobs.store.get(job_id)
    if record is None and job_id is not None:
        expired = await jobs.store.expired(job_id)
        if expired is not None and caller.sees(expired.tenant):
            raise job_expired(expired.message)
    if record is None or not caller.sees(record.tenant):
        raise job_not_found(name)
    return record


async def _check_text(jobs: JobService, record: JobRecord, after: Cursor) -> None:
    """Raises 410 where the text of an ended job has expired that follows `after`."""
    if record.state in TERMINAL_STATES:
        for event in await jobs.store.read_log(record.job_id, after, 1):
            check_expiry(event, record)


async def _find_dead_letter(
    dead_letters: DeadLetters, caller: Caller, name: str
) -> DeadLetter | Requeued:
    if name == "requeue":  # a route that has other methods
        raise HTTPException(405)
    job_id = parse_job_id(name)
    dead_letter = None if job_id is None else await dead_letters.get(job_id)
    if dead_letter is None or not caller.sees(dead_letter.tenant):
        raise dead_letter_not_found(name)
    return dead_letter


def _cannot_run(name: str, why: str) -> ClientError:
    return ClientError(
        f"The job '{name[:MAX_ECHO_CHARS]}' cannot be run again. {why}",
        status=409,
        code="payload_lost",
        param="id",
        should_retry=False,
    )
