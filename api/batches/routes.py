"""/v1/batches: a file of requests that are answered when there is time."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.batches.protocol import BatchList, BatchObject, BatchRequest
from api.batches.service import BatchesDep
from api.errors import unknown_parameter
from api.http.caller import CallerDep
from api.http.json_response import json_response
from api.http.openapi import BODY, NAMED, PAGE_AFTER, STORE, errors, limit, parameters
from api.http.pagination import page_of, page_response
from api.http.response_headers import set_durability_header
from api.jobs.request_reader import JsonRoute
from shared.transport.ports.batches import BatchError, BatchRecord, BatchStatus

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


@router.post("/v1/batches", response_model=BatchObject, responses=errors(BODY))
async def create_batch(
    request: Request, params: BatchRequest, caller: CallerDep, batches: BatchesDep
) -> Response:
    """Creates a batch of an uploaded file. Errors in its lines appear in `errors` later."""
    record, durability = await batches.create(caller.tenant, params)
    set_durability_header(request.scope, durability)
    return json_response(batch_payload(record))


@router.get(
    "/v1/batches",
    response_model=BatchList,
    responses=errors(STORE),
    openapi_extra=parameters(limit(DEFAULT_LIMIT, MAX_LIMIT), PAGE_AFTER),
)
async def list_batches(request: Request, caller: CallerDep, batches: BatchesDep) -> Response:
    """Lists the caller's batches, newest first: `limit` (1 to 100, default 20), `after` (an id)."""
    page = page_of(request, DEFAULT_LIMIT, MAX_LIMIT)
    records = await batches.list(caller.tenant, page.after, page.limit + 1)
    return page_response([batch_payload(record) for record in records], page)


@router.get("/v1/batches/{batch_id}", response_model=BatchObject, responses=errors(NAMED))
async def get_batch(
    request: Request, batch_id: str, caller: CallerDep, batches: BatchesDep
) -> Response:
    """Returns a batch: its status, counts, and its files as soon as there are any."""
    for name in request.query_params:
        raise unknown_parameter(name)
    return json_response(batch_payload(await batches.find(caller.tenant, batch_id)))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    response_model=BatchObject,
    responses=errors(NAMED | {409}),
)
async def cancel_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> Response:
    """Cancels a batch: its running rows end, its results so far are kept."""
    return json_response(batch_payload(await batches.cancel(caller.tenant, batch_id)))


def batch_payload(record: BatchRecord) -> dict[str, Any]:
    """OpenAI's batch object. Times are Unix seconds of the Redis clock; null: not (yet)."""
    progress, usage = record.progress, record.progress.usage
    times = {
        f"{status.value}_at": _seconds(record.times_ms.get(status))
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
    }
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": progress.model,
        "errors": _errors(record.errors),
        "input_file_id": record.input_file_id,
        "completion_window": record.window,
        "status": record.status.value,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_ms // 1000,
        **times,
        "request_counts": {
            "total": progress.total,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
        "metadata": record.metadata,
    }


def _errors(errors: tuple[BatchError, ...]) -> dict[str, Any] | None:
    if not errors:
        return None
    return {"object": "list", "data": [error._asdict() for error in errors]}


def _seconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds // 1000
