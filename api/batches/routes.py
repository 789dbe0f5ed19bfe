"""/v1/batches: BatchService, which creates, lists and cancels batches, and its routes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from api.batches.protocol import (
    ENDPOINT_PATHS,
    BatchDeleted,
    BatchesQuery,
    BatchList,
    BatchObject,
    BatchRequest,
    checked_metadata,
    window_s,
)
from api.dependencies import provided
from api.errors import MAX_ECHO_CHARS, ApiError, UnavailableError, overloaded, unavailable
from api.files.service import file_not_found, parse_life_s, unavailable_files
from api.files.storage import FileStorage
from api.http.caller import CallerDep
from api.http.json_response import LongJsonResponse, json_response
from api.http.openapi import BODY, NAMED, STORE, errors
from api.http.pagination import NO_QUERY
from api.http.response_headers import set_durability_header
from api.http.time_slices import SlicesDep
from api.jobs.admission import DurableAccept, NotConfirmed
from api.jobs.request_reader import JsonRoute
from api.request_errors import ClientError
from shared.messages import Durability, InvalidParameter
from shared.transport.ports.batches import (
    OVER,
    BatchesFull,
    BatchLimits,
    BatchOpen,
    BatchRecord,
    BatchStatus,
    BatchStore,
    NewBatch,
    NoInput,
    new_batch_id,
)
from shared.transport.ports.jobs import TransportError

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

FULL_RETRY_S = 60.0
MAX_OPEN_BATCHES = 1000  # of all tenants
MAX_RECORDS_PER_TENANT = 10_000


class BatchService:
    """Creates and finds batches of one tenant at a time. All methods raise TransportError."""

    def __init__(
        self,
        batches: BatchStore,
        storage: FileStorage,
        durable: DurableAccept,
        limits: BatchLimits,
        output_life_s: int,
    ) -> None:
        """Keeps output files for `output_life_s` by default."""
        self._batches = batches
        self._storage = storage
        self._durable = durable
        self._limits = limits
        self._output_life_s = output_life_s

    async def create(self, tenant: str, params: BatchRequest) -> tuple[BatchRecord, Durability]:
        """Accepts a batch whose input file exists; its lines are validated later.

        Returns its record and the durability that the acceptance has waited for. Raises
        InvalidParameter, ClientError and UnavailableError.
        """
        if params.endpoint not in ENDPOINT_PATHS:
            raise InvalidParameter("endpoint", f"must be one of {', '.join(ENDPOINT_PATHS)}")
        life_s = self._output_life_s
        if (after := params.output_expires_after) is not None:
            life_s = parse_life_s(after.anchor, after.seconds, "output_expires_after")
        batch = NewBatch(
            batch_id=new_batch_id(),
            tenant=tenant,
            endpoint=params.endpoint,
            input_file_id=params.input_file_id,
            window=params.completion_window,
            window_ms=window_s(params.completion_window) * 1000,
            metadata=checked_metadata(params.metadata),
            output_life_ms=life_s * 1000,
        )
        durability = self._durable.default if params.durability is None else params.durability
        await self._durable.check(durability)
        record = await self._create(batch)
        try:
            await self._durable.confirm("batch", [batch.batch_id], durability)
        except TransportError as error:
            # The client will send the request again: this batch must not run.
            with contextlib.suppress(TransportError):
                await self._batches.cancel(batch.batch_id, tenant)
            if isinstance(error, NotConfirmed):
                raise unavailable(str(error)) from error
            raise
        return record, durability

    async def list(self, tenant: str, after: str | None, limit: int) -> Sequence[BatchRecord]:
        """Returns the tenant's batches, newest first, after the batch with id `after`."""
        return await self._batches.list(tenant, after, limit)

    async def find(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns the record of a batch. Raises ClientError (404), also for another tenant's."""
        record = await self._batches.get(batch_id, tenant)
        if record is None:
            raise batch_not_found(batch_id)
        return record

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancels a batch and returns its record. Idempotent while it runs.

        Raises ClientError: 404, or 409 for a batch that has ended otherwise.
        """
        if not await self._batches.cancel(batch_id, tenant):
            raise batch_not_found(batch_id)
        record = await self.find(tenant, batch_id)
        if record.status in OVER and record.status is not BatchStatus.CANCELLED:
            raise ClientError(
                f"The batch cannot be cancelled: it is {record.status.value}.",
                status=409,
                code="batch_has_ended",
                param="batch_id",
                should_retry=False,
            )
        return record

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Deletes the record of a batch that has ended; its files stay.

        Raises ClientError: 404, or 409 for a batch that has not ended.
        """
        try:
            found = await self._batches.drop(batch_id, tenant)
        except BatchOpen as error:
            raise ClientError(
                f"The batch cannot be deleted: it is {error.status.value}. Cancel it first.",
                status=409,
                code="batch_has_not_ended",
                param="batch_id",
                should_retry=False,
            ) from None
        if not found:
            raise batch_not_found(batch_id)

    async def _create(self, batch: NewBatch) -> BatchRecord:
        if not self._storage.is_available:
            raise unavailable_files("This frontend has no files, and therefore no batches.")
        try:
            return await self._batches.create(batch, self._limits)
        except NoInput as error:
            if error.purpose is None:
                raise file_not_found(batch.input_file_id) from None
            raise InvalidParameter(
                "input_file_id", f"is a file for '{error.purpose}', not for 'batch'"
            ) from None
        except BatchesFull as error:
            if error.scope == "total":
                raise overloaded(
                    "Too many batches have not ended. Try again later.", FULL_RETRY_S
                ) from None
            raise UnavailableError(
                429,
                "Too many of your batches have not ended. Try again later.",
                kind="rate_limit_error",
                code="too_many_batches",
                retry_after_s=FULL_RETRY_S,
            ) from None


def batch_not_found(batch_id: str) -> ApiError:
    return ClientError(
        f"No batch '{batch_id[:MAX_ECHO_CHARS]}': it never existed, or its record has expired.",
        status=404,
        code="batch_not_found",
        param="batch_id",
    )


BatchesDep = Annotated[BatchService, provided(BatchService)]


@router.post("/v1/batches", response_model=BatchObject, responses=errors(BODY))
async def create_batch(
    request: Request, params: BatchRequest, caller: CallerDep, batches: BatchesDep
) -> Response:
    """Creates a batch of an uploaded file. Errors in its lines appear in `errors` later."""
    record, durability = await batches.create(caller.tenant, params)
    set_durability_header(request.scope, durability)
    return json_response(BatchObject.of(record))


@router.get("/v1/batches", response_model=BatchList, responses=errors(STORE))
async def list_batches(
    query: Annotated[BatchesQuery, Query()],
    caller: CallerDep,
    batches: BatchesDep,
    slices: SlicesDep,
) -> Response:
    """Lists the caller's batches, newest first."""
    records = await batches.list(caller.tenant, query.after, query.limit + 1)
    return LongJsonResponse(BatchList.of(records, query.limit, BatchObject.of), slices)


@router.get(
    "/v1/batches/{batch_id}",
    response_model=BatchObject,
    responses=errors(NAMED),
    dependencies=[NO_QUERY],
)
async def get_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> Response:
    """Returns a batch: its status, counts, and its files as soon as there are any."""
    return json_response(BatchObject.of(await batches.find(caller.tenant, batch_id)))


@router.post(
    "/v1/batches/{batch_id}/cancel", response_model=BatchObject, responses=errors(NAMED | {409})
)
async def cancel_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> Response:
    """Cancels a batch: its running rows end, its results so far are kept."""
    return json_response(BatchObject.of(await batches.cancel(caller.tenant, batch_id)))


@router.delete(
    "/v1/batches/{batch_id}", response_model=BatchDeleted, responses=errors(NAMED | {409})
)
async def delete_batch(batch_id: str, caller: CallerDep, batches: BatchesDep) -> Response:
    """Deletes the record of a batch that has ended. Its files stay until they are deleted."""
    await batches.delete(caller.tenant, batch_id)
    return json_response(BatchDeleted(id=batch_id))
