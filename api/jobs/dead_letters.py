"""Jobs that killed whatever ran them: look, run again, throw away."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dependencies import provided
from api.errors import (
    MAX_ECHO_CHARS,
    ClientError,
    job_not_found,
    letter_not_found,
    unknown_parameter,
)
from api.http.caller import Caller, CallerDep
from api.http.json_response import json_response
from api.http.openapi import NAMED, STORE, errors, limit, parameters
from api.ids import parse_job_id, public_id
from api.jobs.protocol import DeadLetterDeleted, DeadLetterList, JobAnswer, job_payload
from api.jobs.routes import DEFAULT_LIMIT, MAX_LIMIT, list_limit
from api.jobs.service import JobsDep, JobService
from shared.keys import new_job_id
from shared.messages import OnDisconnect
from shared.transport.ports.dead_letters import DeadLetter, DeadLetters, Requeued
from shared.transport.wire import PayloadInvalid

router = APIRouter(tags=["Jobs"])

DeadLettersDep = Annotated[DeadLetters, provided(DeadLetters)]


@router.get(
    "/v1/dead-letters",
    response_model=DeadLetterList,
    responses=errors(STORE),
    openapi_extra=parameters(limit(DEFAULT_LIMIT, MAX_LIMIT)),
)
async def list_dead_letters(
    request: Request, caller: CallerDep, dead_letters: DeadLettersDep
) -> Response:
    """Newest first. `limit`: 1 to 1000, 20 by default."""
    query = request.query_params
    for name in query:
        if name != "limit":
            raise unknown_parameter(name)
    length = list_limit(query.get("limit", str(DEFAULT_LIMIT)))
    letters = await dead_letters.list(caller.scope, length)
    return json_response({"object": "list", "data": [_payload(letter) for letter in letters]})


@router.delete("/v1/dead-letters/{name}", response_model=DeadLetterDeleted, responses=errors(NAMED))
async def delete_dead_letter(
    name: str, caller: CallerDep, dead_letters: DeadLettersDep
) -> Response:
    """Throws the letter of this job away, and what was kept of its request."""
    letter = await _find(dead_letters, caller, name)
    if isinstance(letter, Requeued) or not await dead_letters.drop(letter.job_id):
        raise letter_not_found(name)
    payload = {"id": public_id(letter.kind, letter.job_id), "object": "dead_letter"}
    return json_response({**payload, "deleted": True})


@router.post("/v1/jobs/{name}/requeue", response_model=JobAnswer, responses=errors(NAMED | {409}))
async def requeue_job(
    name: str, caller: CallerDep, jobs: JobsDep, dead_letters: DeadLettersDep
) -> Response:
    """Runs a dead letter's job again: as a new job without a history and without a reader.

    Returns the new job. Idempotent: the job replaces the letter, and for a day the same request
    returns the same job.
    """
    letter = await _find(dead_letters, caller, name)
    if isinstance(letter, Requeued):
        new_id = letter.job_id
    else:
        new_id = await _requeue(jobs, dead_letters, name, letter.job_id)
    record = await jobs.store.get(new_id)
    if record is None:
        raise job_not_found(new_id)
    return json_response(job_payload(record))


async def _requeue(jobs: JobService, dead_letters: DeadLetters, name: str, job_id: str) -> str:
    try:
        kept = await dead_letters.request(job_id)
    except PayloadInvalid as error:
        raise _cannot_run(name, str(error)) from error
    if kept is None:
        raise _cannot_run(name, "Its request was not kept.")
    job = replace(
        kept,
        job_id=new_job_id(),
        on_disconnect=OnDisconnect.CONTINUE,
        queue_timeout_ms=None,  # of the first job's reader
    )
    taken_by = await jobs.admission.requeue(job_id, job)
    if taken_by is None:  # thrown away a moment ago
        raise letter_not_found(name)
    return taken_by


async def _find(dead_letters: DeadLetters, caller: Caller, name: str) -> DeadLetter | Requeued:
    job_id = parse_job_id(name)
    letter = None if job_id is None else await dead_letters.get(job_id)
    if letter is None or not caller.sees(letter.tenant):
        raise letter_not_found(name)
    return letter


def _cannot_run(name: str, why: str) -> ClientError:
    return ClientError(
        f"The job '{name[:MAX_ECHO_CHARS]}' cannot be run again. {why}",
        status=409,
        code="payload_lost",
        param="id",
        should_retry=False,
    )


def _payload(letter: DeadLetter) -> dict[str, Any]:
    """`died_at`: Unix seconds of the Redis clock."""
    return {
        "id": public_id(letter.kind, letter.job_id),
        "object": "dead_letter",
        "job_id": letter.job_id,
        "model": letter.model,
        "kind": letter.kind,
        "tenant": letter.tenant,
        "code": letter.reason,
        "crashes": letter.crashes,
        "completion_tokens": letter.num_tokens,
        "died_at": letter.died_ms / 1000,
    }
