"""Bulk actions of operators: cancel jobs, and run dead letters again, in slices.

A request handles one slice and returns where the next one begins, so that none is long.
Each job ends, or is submitted, by the transition of a single one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from api.auth.operators import OperatorDep, who
from api.errors import ApiError, store_unreachable
from api.generation.protocol import RequestModel
from api.generation.response_schemas import ResponseModel
from api.http.caller import Caller
from api.http.json_response import json_response
from api.http.openapi import BODY, errors
from api.ids import parse_job_id, without_prefix
from api.jobs.protocol import CURSOR, Name, job_filter
from api.jobs.request_reader import JsonRoute
from api.jobs.routes import DeadLettersDep, SearchDep, requeue
from api.jobs.service import JobsDep, JobService
from api.request_errors import ClientError
from shared.messages import InvalidParameter, JobState
from shared.transport.ports.dead_letters import DeadLetter, Requeued
from shared.transport.ports.job_search import MAX_LISTED, JobCursor, JobFilter
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

router = APIRouter(route_class=JsonRoute, tags=["Operators"])

MAX_SLICE = 100  # jobs of one request
MAX_DEAD_LETTERS = 1000  # that there are
DEAD_LETTER_CURSOR = r"^[0-9]{1,16}\.[0-9]{1,2}-[0-9A-Za-z_-]{1,64}$"

Ids = Annotated[list[Name], Field(min_length=1, max_length=MAX_SLICE)]
Slice = Annotated[int, Field(ge=1, le=MAX_SLICE)]


class LiveJobs(RequestModel):
    """Jobs that have not ended; a member that is left out matches any."""

    state: Literal["queued", "running"] | None = None
    tenant: Name | None = None
    model: Name | None = None
    id: Name | None = None


class DeadLetterFilter(RequestModel):
    """Dead letters; a member that is left out matches any."""

    tenant: Name | None = None
    model: Name | None = None
    error: Name | None = None


class BulkRequest(RequestModel):
    """Exactly one of `ids` and `filter` is given; `{}` as filter is all. With `dry_run` nothing is
    done, and `matched` is the number of what would be, up to a thousand."""

    ids: Ids | None = None
    limit: Slice = MAX_SLICE
    dry_run: bool = False

    @model_validator(mode="after")
    def _check_what(self) -> BulkRequest:
        if (self.ids is None) == (getattr(self, "filter", None) is None):
            raise InvalidParameter("ids", "exactly one of 'ids' and 'filter' must be given")
        return self


class CancelRequest(BulkRequest):
    """POST /v1/jobs/cancel. `after`: the `next` of the slice before."""

    filter: LiveJobs | None = None
    after: Annotated[str, Field(pattern=CURSOR)] | None = None


class RequeueRequest(BulkRequest):
    """POST /v1/dead-letters/requeue. `after`: the `next` of the slice before."""

    filter: DeadLetterFilter | None = None
    after: Annotated[str, Field(pattern=DEAD_LETTER_CURSOR)] | None = None


class BulkResult(ResponseModel):
    """What became of one slice. `next`: send the request again with this `after`; null: it was the
    last one. `stopped`: why the slice ended early; then `next` begins with the rest."""

    matched: int
    not_found: int = 0
    has_more: bool = False
    next: str | None = None
    stopped: str | None = None


class Cancelled(BulkResult):
    """Jobs that a request cancelled, and those that had ended when their turn came."""

    object: Literal["jobs.cancelled"] = "jobs.cancelled"
    cancelled: int = 0
    already_ended: int = 0


class DeadLettersRequeued(BulkResult):
    """Dead letters that a request ran again, those that had been, and those whose request is
    lost."""

    object: Literal["dead_letters.requeued"] = "dead_letters.requeued"
    requeued: int = 0
    already_requeued: int = 0
    failed: int = 0


@router.post("/v1/jobs/cancel", response_model=Cancelled, responses=errors(BODY))
async def cancel_jobs(
    params: CancelRequest, operator: OperatorDep, jobs: JobsDep, search: SearchDep
) -> Response:
    """Cancels jobs by their ids, or the live ones that match a filter, a slice at a time.
    Jobs that are submitted after the first slice are not among them."""
    result = Cancelled(matched=0)
    job_ids: Sequence[str]
    if params.filter is not None:
        wanted = _live(operator, params.filter)
        limit = MAX_LISTED if params.dry_run else params.limit
        after = None if params.after is None else JobCursor.parse(params.after)
        found = await search.find(wanted, limit, after)
        job_ids = [record.job_id for record in found.records]
        result.next = None if found.after is None else str(found.after)
        result.has_more = result.next is not None
    else:
        job_ids = [parse_job_id(name) or "" for name in params.ids or ()]
    result.matched = len(job_ids)
    if params.dry_run:
        return json_response(result)
    try:
        for job_id in job_ids:
            ended = await jobs.cancel(job_id) if await _sees(operator, jobs, job_id) else None
            if ended is None:
                result.not_found += 1
            elif ended.won:
                result.cancelled += 1
            else:
                result.already_ended += 1
    finally:  # also of a slice that Redis interrupts
        log.warning("an operator cancels jobs", extra=_audit(operator, params, result))
    return json_response(result)


@router.post("/v1/dead-letters/requeue", response_model=DeadLettersRequeued, responses=errors(BODY))
async def requeue_dead_letters(
    params: RequeueRequest, operator: OperatorDep, jobs: JobsDep, dead_letters: DeadLettersDep
) -> Response:
    """Runs dead letters again by their jobs' ids, or those that match a filter, a slice at a time.
    Each becomes a new job. A full queue ends the slice early."""
    result = DeadLettersRequeued(matched=0)
    if params.filter is not None:
        tenant = operator.scope or params.filter.tenant
        letters = await dead_letters.list(tenant, MAX_DEAD_LETTERS)
        found = _matching(letters, params.filter, params.after)
        chosen = found if params.dry_run else found[: params.limit]
        result.has_more = len(found) > len(chosen)
        places = [(_place(letter), letter.job_id) for letter in chosen]
    else:
        places = [("", parse_job_id(name) or "") for name in params.ids or ()]
    result.matched = len(places)
    if params.dry_run:
        return json_response(result)
    done = params.after
    for place, job_id in places:
        try:
            letter = await dead_letters.get(job_id) if job_id else None
            if isinstance(letter, Requeued):
                result.already_requeued += 1
            elif letter is None or not operator.sees(letter.tenant):
                result.not_found += 1
            else:
                await requeue(jobs, dead_letters, job_id, job_id)
                result.requeued += 1
        except ClientError:  # its request is lost, or it was deleted a moment ago
            result.failed += 1
        except ApiError as error:  # the queue is full: later ones would fail too
            result.stopped, result.has_more = error.message, True
            break
        except TransportError as error:
            result.stopped, result.has_more = store_unreachable(error).message, True
            break
        done = place
    if params.filter is not None and result.has_more:
        result.next = done
    log.warning("an operator requeues dead letters", extra=_audit(operator, params, result))
    return json_response(result)


async def _sees(operator: Caller, jobs: JobService, job_id: str) -> bool:
    """Returns whether the job is of a tenant that the operator sees, which may be one alone."""
    if operator.scope is None:
        return True
    record = await jobs.store.get(job_id)
    return record is not None and operator.sees(record.tenant)


def _live(operator: Caller, of: LiveJobs) -> JobFilter:
    state = None if of.state is None else JobState(of.state)
    if of.id is not None and not without_prefix(of.id):
        raise InvalidParameter("filter.id", "needs a part of the id after its prefix")
    wanted = job_filter(operator, state, of.tenant, of.model, None, of.id)
    return replace(wanted, is_live=True)


def _matching(
    letters: Sequence[DeadLetter], wanted: DeadLetterFilter, after: str | None
) -> list[DeadLetter]:
    """Returns the dead letters that match, newest first, from the place `after` on."""
    found = [
        letter
        for letter in letters
        if wanted.model in (None, letter.model) and wanted.error in (None, letter.reason)
    ]
    found.sort(key=_key, reverse=True)
    if after is None:
        return found
    died_ms, _, job_id = after.partition(".")
    return [letter for letter in found if _key(letter) < (int(died_ms), job_id)]


def _key(letter: DeadLetter) -> tuple[int, str]:
    return letter.died_ms, letter.job_id


def _place(letter: DeadLetter) -> str:
    return f"{letter.died_ms}.{letter.job_id}"


def _audit(operator: Caller, params: BulkRequest, result: BulkResult) -> dict[str, Any]:
    asked = params.model_dump(exclude={"ids"}, exclude_none=True)
    return {
        **who(operator),
        "asked": asked.get("filter", f"{len(params.ids or ())} ids"),
        "result": result.model_dump(exclude={"object", "next"}),
    }
