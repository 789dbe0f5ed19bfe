"""/v1/responses: OpenAI's Responses API over durable jobs."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.responses.formatter import ResponseFormatter
from api.dialects.responses.items import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    ORDERS,
    items_of_page,
)
from api.dialects.responses.protocol import (
    LOGPROBS,
    ItemList,
    ResponseDeleted,
    ResponseObject,
    ResponseRequest,
    check_includes,
)
from api.dialects.responses.request import (
    prepare_response,
)
from api.dialects.responses.store import (
    ResponsesDep,
    response_not_found,
)
from api.errors import (
    ClientError,
    unknown_parameter,
    unsupported,
)
from api.generation.formatter import Timing
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.json_response import LongJsonResponse, json_response
from api.http.openapi import IDEMPOTENT, JOB, NAMED, errors, limit, parameters, query, streamed
from api.http.pagination import page_of, page_response
from api.http.response_headers import set_durability_header, set_rate_limit_headers
from api.jobs.request_reader import JsonRoute
from api.jobs.sent_events import SentEvents
from api.jobs.service import JobsDep, JobService
from api.jobs.sources import AttachedJob
from api.jobs.stream_response import EventStreamBody, StreamResponse, generation_response
from shared.messages import InvalidParameter, Job

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

MAX_SEQUENCE_NUMBER = 2**53
INCLUDES = ("include", "include[]")  # the SDK's way to write a list, and others'
_INCLUDE = query("include", {"type": "string", "enum": [LOGPROBS]})
_EVENTS_OF_RESPONSE = parameters(
    query("stream", {"type": "boolean", "default": False}),
    query(
        "starting_after",
        {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER - 1},
        "Only with `stream`: the number of the last event that was read.",
    ),
    _INCLUDE,
    query("include_obfuscation", {"type": "boolean", "enum": [False]}),
)


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=streamed(JOB),
    openapi_extra=IDEMPOTENT,
)
async def create_response(
    request: Request,
    params: ResponseRequest,
    caller: CallerDep,
    jobs: JobsDep,
    generation: GenerationDep,
    responses: ResponsesDep,
) -> Response:
    """The next turn of a conversation: whole, as a stream of events, or in the background."""
    job, formatter = await prepare_response(generation, responses, caller, params)
    if params.background and not params.stream:
        return await _begin(request, jobs, job, formatter)
    return generation_response(jobs, (job,), formatter, Timing(), streamed=params.stream)


@router.get(
    "/v1/responses/{name}",
    response_model=ResponseObject,
    responses=streamed(NAMED),
    openapi_extra=_EVENTS_OF_RESPONSE,
)
async def get_response(
    request: Request, name: str, caller: CallerDep, jobs: JobsDep, responses: ResponsesDep
) -> Response:
    """The response as it is now; with `stream` its events, from `starting_after` on."""
    query = request.query_params
    for member in query:
        if member not in ("stream", "starting_after", "include_obfuscation", *INCLUDES):
            raise unknown_parameter(member)
    _check_includes(query)
    if _flag(query, "include_obfuscation"):
        raise unsupported("include_obfuscation", "no padding is sent")
    starting_after = _sequence_number(query)
    is_streamed = _flag(query, "stream")
    if starting_after is not None and not is_streamed:
        raise InvalidParameter("starting_after", "only allowed when 'stream' is true")
    stored = await responses.find(caller.tenant, name)
    if not is_streamed:
        read = await responses.read(stored)
        return LongJsonResponse(read.payload, jobs.slices)
    formatter = await responses.open(stored, starting_after)
    # Read from the start of the log: an event's number is known by counting alone.
    body = EventStreamBody(jobs, SentEvents(formatter, counts=False))
    return StreamResponse(jobs, AttachedJob(jobs, stored.record), body)


@router.post("/v1/responses/{name}/cancel", response_model=ResponseObject, responses=errors(NAMED))
async def cancel_response(
    name: str, caller: CallerDep, jobs: JobsDep, responses: ResponsesDep
) -> Response:
    """Cancels one that runs in the background; the answer is how it ended. Idempotent."""
    stored = await responses.find(caller.tenant, name)
    if not stored.facts.background:
        raise ClientError(
            "Only a response that was created with 'background' can be cancelled; any other is by "
            "closing its connection.",
            code="not_in_background",
            param="response_id",
        )
    await jobs.cancel(stored.job_id)
    read = await responses.read(stored)
    return LongJsonResponse(read.payload, jobs.slices)


@router.delete("/v1/responses/{name}", response_model=ResponseDeleted, responses=errors(NAMED))
async def delete_response(
    name: str, caller: CallerDep, jobs: JobsDep, responses: ResponsesDep
) -> Response:
    """Cancels it, where it still runs, and drops all that is kept of it."""
    stored = await responses.find(caller.tenant, name)
    await jobs.cancel(stored.job_id)
    if not await jobs.store.forget(stored.job_id):
        raise response_not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{name}/input_items",
    response_model=ItemList,
    responses=errors(NAMED),
    openapi_extra=parameters(
        limit(DEFAULT_LIMIT, MAX_LIMIT),
        query("order", {"type": "string", "enum": list(ORDERS)}),
        query("after", {"type": "string"}, "The id of the last item read."),
        _INCLUDE,
    ),
)
async def list_input_items(
    request: Request, name: str, caller: CallerDep, responses: ResponsesDep
) -> Response:
    """The items of its own request, not those of earlier turns."""
    page = page_of(request, DEFAULT_LIMIT, MAX_LIMIT, ("order", *INCLUDES))
    query = request.query_params
    _check_includes(query)
    stored = await responses.find(caller.tenant, name)
    items = items_of_page(stored.facts.input, query.get("order", ORDERS[0]), page)
    return page_response(items, page)


async def _begin(
    request: Request, jobs: JobService, job: Job, formatter: ResponseFormatter
) -> Response:
    """Submits a job without a reader."""
    with jobs.open_requests.enter():
        submission = await jobs.admission.submit(job, "")
    set_rate_limit_headers(request.scope, submission.allowances)
    set_durability_header(request.scope, job.durability)
    jobs.metrics.requests.labels(job.kind, "background").inc()
    return json_response(formatter.so_far(has_started=False))


def _check_includes(query: QueryParams) -> None:
    check_includes([value for name in INCLUDES for value in query.getlist(name)])


def _flag(query: QueryParams, name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise InvalidParameter(name, "must be 'true' or 'false'")
    return value == "true"


def _sequence_number(query: QueryParams) -> int | None:
    text = query.get("starting_after")
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else -1
    if not 0 <= number < MAX_SEQUENCE_NUMBER:
        raise InvalidParameter("starting_after", "must be the sequence_number of an event")
    return number
