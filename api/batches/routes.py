"""/v1/batches: a file of requests, answered when there is time."""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.batches.protocol import ENDPOINT_PATHS, BatchRequest, checked_metadata, window_s
from api.dependencies import caller_of, read_request, services_of
from api.errors import (
    MAX_ECHO_CHARS,
    ApiError,
    CallerError,
    UnavailableError,
    overloaded,
    unavailable,
    unknown_parameter,
)
from api.files.service import file_not_found, parse_life_s, unavailable_files
from api.http.json_response import json_answer
from api.http.pagination import page_answer, page_of
from api.http.response_headers import set_durability_header
from api.jobs.admission import NotConfirmed
from api.services import Services
from shared.messages import InvalidParameter
from shared.transport.ports.batches import (
    OVER,
    BatchError,
    BatchesFull,
    BatchLimits,
    BatchRecord,
    BatchStatus,
    NewBatch,
    NoInput,
    new_batch_id,
)
from shared.transport.ports.jobs import TransportError

router = APIRouter()

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_RECORDS_PER_TENANT = 10_000
FULL_RETRY_S = 60.0


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """Accepted when there is a file to read; what is wrong with its lines is said later."""
    services = services_of(request)
    asked = await read_request(request, BatchRequest)
    if asked.endpoint not in ENDPOINT_PATHS:
        raise InvalidParameter("endpoint", f"must be one of {', '.join(ENDPOINT_PATHS)}")
    settings = services.settings
    life_s = settings.file_life_s
    if (after := asked.output_expires_after) is not None:
        life_s = parse_life_s(after.anchor, after.seconds, "output_expires_after")
    batch = NewBatch(
        batch_id=new_batch_id(),
        tenant=caller_of(request).tenant,
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        window=asked.completion_window,
        window_ms=window_s(asked.completion_window) * 1000,
        metadata=checked_metadata(asked.metadata),
        output_life_ms=life_s * 1000,
    )
    limits = BatchLimits(
        max_open=settings.max_open_batches,
        max_tenant_open=settings.max_open_batches_per_tenant,
        max_tenant_records=MAX_RECORDS_PER_TENANT,
        keep_ms=settings.file_life_s * 1000,
    )
    durability = asked.durability
    if durability is None:
        durability = settings.accept_durability
    await services.durable.check(durability)
    record = await _created(services, batch, limits)
    try:
        await services.durable.confirm("batch", [batch.batch_id], durability)
    except TransportError as error:
        # The caller will ask for another one: this one is not to run.
        with contextlib.suppress(TransportError):
            await services.batches.cancel(batch.batch_id, batch.tenant)
        if isinstance(error, NotConfirmed):
            raise unavailable(str(error)) from error
        raise
    set_durability_header(request.scope, durability)
    return json_answer(batch_payload(record))


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """One's own, newest first. `limit`: 1 to 100, 20 by default; `after`: a batch's id."""
    page = page_of(request, DEFAULT_LIMIT, MAX_LIMIT)
    tenant = caller_of(request).tenant
    records = await services_of(request).batches.list(tenant, page.after, page.limit + 1)
    return page_answer([batch_payload(record) for record in records], page)


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """Status, counts, and the files as soon as there are any."""
    for name in request.query_params:
        raise unknown_parameter(name)
    return json_answer(batch_payload(await _find(request, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """No new rows; those that run are cancelled, what is done is kept. Idempotent while it lasts;
    409 for a batch that has ended otherwise."""
    batches = services_of(request).batches
    if not await batches.cancel(batch_id, caller_of(request).tenant):
        raise batch_not_found(batch_id)
    record = await _find(request, batch_id)
    if record.status in OVER and record.status is not BatchStatus.CANCELLED:
        raise CallerError(
            f"The batch cannot be cancelled: it is {record.status.value}.",
            status=409,
            code="batch_has_ended",
            param="batch_id",
            should_retry=False,
        )
    return json_answer(batch_payload(record))


async def _created(services: Services, batch: NewBatch, limits: BatchLimits) -> BatchRecord:
    if not services.files.storage.is_available:
        raise unavailable_files("This frontend has no files, and therefore no batches.")
    try:
        return await services.batches.create(batch, limits)
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


async def _find(request: Request, batch_id: str) -> BatchRecord:
    record = await services_of(request).batches.get(batch_id, caller_of(request).tenant)
    if record is None:
        raise batch_not_found(batch_id)
    return record


def batch_not_found(batch_id: str) -> ApiError:
    return CallerError(
        f"No batch '{batch_id[:MAX_ECHO_CHARS]}': it never existed, or its record has expired.",
        status=404,
        code="batch_not_found",
        param="batch_id",
    )


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
