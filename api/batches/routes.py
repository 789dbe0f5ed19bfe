"""/v1/batches: a file of requests that are answered when there is time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request

from api.batches.protocol import BatchesQuery, BatchList, BatchObject, BatchRequest
from api.batches.service import BatchesDep
from api.http.caller import CallerDep
from api.http.openapi import BODY, NAMED, STORE, errors
from api.http.pagination import NO_QUERY
from api.http.response_headers import set_durability_header
from api.jobs.request_reader import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post("/v1/batches", responses=errors(BODY))
async def create_batch(
    request: Request, params: BatchRequest, caller: CallerDep, batches: BatchesDep
) -> BatchObject:
    """Creates a batch of an uploaded file. Errors in its lines appear in `errors` later."""
    record, durability = await batches.create(caller.tenant, params)
    set_durability_header(request.scope, durability)
    return BatchObject.of(record)


@router.get("/v1/batches", responses=errors(STORE))
async def list_batches(
    query: Annotated[BatchesQuery, Query()], caller: CallerDep, batches: BatchesDep
) -> BatchList:
    """Lists the caller's batches, newest first."""
    records = await batches.list(caller.tenant, query.after, query.limit + 1)
    return BatchList.of([BatchObject.of(record) for record in records], query.limit)


@router.get("/v1/batches/{batch_id}", responses=errors(NAMED), dependencies=[NO_QUERY])
async def get_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> BatchObject:
    """Returns a batch: its status, counts, and its files as soon as there are any."""
    return BatchObject.of(await batches.find(caller.tenant, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", responses=errors(NAMED | {409}))
async def cancel_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> BatchObject:
    """Cancels a batch: its running rows end, its results so far are kept."""
    return BatchObject.of(await batches.cancel(caller.tenant, batch_id))
