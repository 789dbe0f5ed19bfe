"""/v1/responses: OpenAI's Responses API over durable jobs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.responses.formatter import CompactionFormatter, ResponseFormatter
from api.dialects.responses.items import items_of_page
from api.dialects.responses.protocol import (
    CompactedResponse,
    CompactRequest,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ItemsQuery,
    ResponseDeleted,
    ResponseObject,
    ResponseQuery,
    ResponseRequest,
)
from api.dialects.responses.request import count_input_tokens, prepare_response
from api.dialects.responses.socket import CONTINUES, WARMS_UP
from api.dialects.responses.store import (
    ResponsesDep,
    ResponseStore,
    StoredResponse,
    response_not_found,
)
from api.generation.formatter import Timing
from api.generation.models import GenerationDep
from api.http.caller import CallerDep, caller_in
from api.http.json_response import LongJsonResponse, json_response
from api.http.openapi import (
    EVENTS_HEADER,
    GENERATES,
    IDEMPOTENT,
    JOB,
    KEPT,
    errors,
    parameters,
    streamed,
)
from api.http.response_headers import set_durability_header, set_rate_limit_headers
from api.http.sse import TYPED
from api.http.time_slices import SlicesDep
from api.http.traces import span_in, trace_generation
from api.jobs.attached_job import AttachedJob
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.sent_events import SentEvents
from api.jobs.service import JobsDep, JobService
from api.jobs.stream_response import EventStreamBody, StreamResponse
from api.request_errors import ClientError, unsupported
from shared.messages import InvalidParameter, Job, OnDisconnect

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=streamed(JOB),
    openapi_extra=GENERATES,
)
async def create_response(
    request: Request,
    params: ResponseRequest,
    caller: CallerDep,
    jobs: JobsDep,
    generation: GenerationDep,
    responses: ResponsesDep,
) -> Response:
    """Returns the next turn of a conversation: whole, as a stream, or in the background."""
    job, formatter = await prepare_response(generation, responses, caller, params)
    if request.scope["state"].get(WARMS_UP):
        events = formatter.warm_up(len(job.prompt_token_ids), time.time_ns() // 1_000_000)
        return Response(b"".join(map(TYPED.event, events)), media_type="text/event-stream")
    if request.scope["state"].get(CONTINUES):
        job = replace(job, on_disconnect=OnDisconnect.CONTINUE)
    if params.background and not params.stream:
        return await _begin(request, jobs, job, formatter)
    return generation_response(jobs, (job,), formatter, Timing(), streamed=params.stream)


@router.post(
    "/v1/responses/compact",
    response_model=CompactedResponse,
    responses=errors(JOB),
    openapi_extra=IDEMPOTENT,
)
async def compact_conversation(
    params: CompactRequest,
    caller: CallerDep,
    jobs: JobsDep,
    generation: GenerationDep,
    responses: ResponsesDep,
) -> Response:
    """Returns a conversation as one item: a summary that the model writes."""
    for name in ("stream", "background"):
        if getattr(params, name):
            raise unsupported(name, "a summary is returned whole")
    params = params.model_copy(update={"store": False})
    job, formatter = await prepare_response(
        generation, responses, caller, params, CompactionFormatter
    )
    return generation_response(jobs, (job,), formatter, Timing(), streamed=False)


@router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=errors(JOB))
async def count_response_tokens(
    params: InputTokensRequest,
    caller: CallerDep,
    generation: GenerationDep,
    responses: ResponsesDep,
) -> Response:
    """Returns the number of tokens that the prompt of a request would have."""
    count = await count_input_tokens(generation, responses, caller, params)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get(
    "/v1/responses/{name}",
    response_model=ResponseObject,
    responses=streamed(KEPT),
    openapi_extra=parameters(EVENTS_HEADER),
)
async def get_response(
    name: str,
    query: Annotated[ResponseQuery, Query()],
    caller: CallerDep,
    jobs: JobsDep,
    responses: ResponsesDep,
) -> Response:
    """Returns the response as it is now; with `stream` its events, from `starting_after` on."""
    _check_is_id(name)
    query.check()
    if query.include_obfuscation:
        raise unsupported("include_obfuscation", "no padding is sent")
    if query.starting_after is not None and not query.stream:
        raise InvalidParameter("starting_after", "only allowed when 'stream' is true")
    stored = await responses.find(caller.tenant, name)
    if not query.stream:
        return await _whole(stored, jobs, responses)
    formatter = await responses.open(stored, query.starting_after)
    # Read from the start of the log: an event's number is known by counting alone.
    body = EventStreamBody(jobs, SentEvents(formatter, counts=False))
    return StreamResponse(jobs, AttachedJob(jobs, stored.record), body)


@router.post("/v1/responses/{name}/cancel", response_model=ResponseObject, responses=errors(KEPT))
async def cancel_response(
    name: str, caller: CallerDep, jobs: JobsDep, responses: ResponsesDep
) -> Response:
    """Cancels one that runs in the background; the answer is how it ended. Idempotent."""
    stored = await responses.find(caller.tenant, name)
    if not stored.request.background:
        raise ClientError(
            "Only a response that was created with 'background' can be cancelled; any other is by "
            "closing its connection.",
            code="not_in_background",
            param="response_id",
        )
    await jobs.cancel(stored.job_id)
    return await _whole(stored, jobs, responses)


@router.delete("/v1/responses/{name}", response_model=ResponseDeleted, responses=errors(KEPT))
async def delete_response(
    name: str, caller: CallerDep, jobs: JobsDep, responses: ResponsesDep
) -> Response:
    """Cancels it, where it still runs, and drops all that is kept of it."""
    _check_is_id(name)
    stored = await responses.find(caller.tenant, name)
    await jobs.cancel(stored.job_id)
    if not await jobs.store.forget(stored.job_id):
        raise response_not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


@router.get("/v1/responses/{name}/input_items", response_model=ItemList, responses=errors(KEPT))
async def list_input_items(
    name: str,
    query: Annotated[ItemsQuery, Query()],
    caller: CallerDep,
    responses: ResponsesDep,
    slices: SlicesDep,
) -> Response:
    """Lists the items of the response's own request, not those of earlier turns."""
    query.check()
    stored = await responses.find(caller.tenant, name)
    items = items_of_page(stored.request.input, query.order, query.after, query.limit)
    return LongJsonResponse(ItemList.of(items, query.limit), slices)


async def _whole(stored: StoredResponse, jobs: JobService, responses: ResponseStore) -> Response:
    """Returns the response object, which counts as a whole answer from before it is read."""
    charge = jobs.answers.take(await jobs.store.stored_bytes(stored.job_id))
    try:
        read = await responses.read(stored)
    except BaseException:
        charge.give()
        raise
    return LongJsonResponse(read.payload, jobs.slices, charge)


def _check_is_id(name: str) -> None:
    """Raises a 405 for the name of a route that has other methods."""
    if name in ("compact", "input_tokens"):
        raise HTTPException(405)


async def _begin(
    request: Request, jobs: JobService, job: Job, formatter: ResponseFormatter
) -> Response:
    """Submits a job without a reader."""
    trace_generation(span_in(request.scope), (job,), caller_in(request.scope).request_id)
    with jobs.open_requests.enter():
        submission = await jobs.admission.submit(job, "")
    set_rate_limit_headers(request.scope, submission.allowances)
    set_durability_header(request.scope, job.durability)
    jobs.metrics.requests.labels(job.kind, "background").inc()
    return json_response(formatter.so_far(has_started=False))
