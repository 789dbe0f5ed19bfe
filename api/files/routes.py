"""/v1/files: what batches read and write."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import (
    ServerError,
    unknown_parameter,
)
from api.files.protocol import FileDeleted, FileList, FileObject
from api.files.service import FilesDep, FileService, unavailable_files
from api.files.storage import BlobDamaged, BlobsUnavailable
from api.http.caller import CallerDep
from api.http.json_response import json_response
from api.http.open_requests import OpenRequests, OpenRequestsDep
from api.http.openapi import NAMED, PAGE_AFTER, STORE, errors, limit, parameters, query
from api.http.pagination import page_of, page_response
from shared.messages import InvalidParameter
from shared.transport.ports.files import FileRecord

router = APIRouter(tags=["OpenAI"])

PATH = "/v1/files"
MAX_LIMIT = 10_000
MAX_PURPOSE_CHARS = 64
ORDERS = ("asc", "desc")
# The form is read by `api.files.upload`, which streams the file to the disk.
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": ["batch"]},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2_592_000,
                        },
                    },
                }
            }
        },
    }
}


@router.post(PATH, response_model=FileObject, responses=errors(STORE | {408}), openapi_extra=_FORM)
async def create_file(request: Request, caller: CallerDep, files: FilesDep) -> Response:
    """Stores the file of a multipart form with `file` and `purpose: batch`."""
    return json_response(file_payload(await files.receive(request, caller.tenant)))


@router.get(
    PATH,
    response_model=FileList,
    responses=errors(STORE),
    openapi_extra=parameters(
        query("purpose", {"type": "string", "enum": ["batch", "batch_output"]}),
        query("order", {"type": "string", "enum": list(ORDERS)}),
        limit(MAX_LIMIT, MAX_LIMIT),
        PAGE_AFTER,
    ),
)
async def list_files(request: Request, caller: CallerDep, files: FilesDep) -> Response:
    """Lists the caller's files, newest first: `purpose`, `order`, `limit`, `after` (an id)."""
    page = page_of(request, MAX_LIMIT, MAX_LIMIT, also=("purpose", "order"))
    order = request.query_params.get("order", "desc")
    if order not in ORDERS:
        raise InvalidParameter("order", f"must be one of {', '.join(ORDERS)}")
    purpose = request.query_params.get("purpose")
    records = await files.index.list(
        caller.tenant,
        page.after,
        page.limit + 1,
        oldest_first=order == "asc",
        purpose=None if purpose is None else purpose[:MAX_PURPOSE_CHARS],
    )
    return page_response([file_payload(record) for record in records], page)


@router.get(PATH + "/{file_id}", response_model=FileObject, responses=errors(NAMED))
async def get_file(request: Request, file_id: str, caller: CallerDep, files: FilesDep) -> Response:
    """Returns the metadata of a file."""
    _refuse_query(request)
    record = await files.get(file_id, caller.tenant)
    return json_response(file_payload(record))


@router.get(
    PATH + "/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, **errors(NAMED)},
)
async def get_content(
    request: Request,
    file_id: str,
    caller: CallerDep,
    files: FilesDep,
    open_requests: OpenRequestsDep,
) -> Response:
    """Streams the bytes of a file. A body that ends early was damaged on the disk meanwhile."""
    _refuse_query(request)
    record = await files.get(file_id, caller.tenant)
    return ContentResponse(files, record, open_requests)


@router.delete(PATH + "/{file_id}", response_model=FileDeleted, responses=errors(NAMED | {409}))
async def delete_file(file_id: str, caller: CallerDep, files: FilesDep) -> Response:
    """Deletes a file; 409 while a batch reads it. Its bytes are removed soon after."""
    await files.drop(file_id, caller.tenant)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def file_payload(record: FileRecord) -> dict[str, Any]:
    """OpenAI's file object. Times are Unix seconds of the Redis clock."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_ms // 1000,
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def _refuse_query(request: Request) -> None:
    for name in request.query_params:
        raise unknown_parameter(name)


# ContentResponse: a file's bytes, once it is certain that all of them are here.

log = logging.getLogger(__name__)


class ContentResponse(Response):
    """An ASGI response of another kind than StreamResponse: bytes of the disk with an announced
    length, without a job, events or keep-alives. They share OpenRequests: limit, disconnect and
    shutdown. Damage on the disk or a shutdown after its begin ends it before its length."""

    def __init__(self, files: FileService, record: FileRecord, open_requests: OpenRequests) -> None:
        super().__init__()
        self._files = files
        self._record = record
        self._open_requests = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._open_requests.enter() as request:
            await self._check()
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(self._record.num_bytes).encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await request.run(receive, lambda: self._send(send))

    async def _check(self) -> None:
        """Raises UnavailableError, ServerError."""
        try:
            await self._files.storage.check(self._record.parts)
        except BlobsUnavailable as error:
            raise unavailable_files(str(error)) from error
        except BlobDamaged as error:
            self._log_damage(error)
            raise ServerError(
                "The file's content is missing or damaged on this frontend's disk.",
                code="file_content_lost",
            ) from error

    async def _send(self, send: Send) -> None:
        try:
            async for block in self._files.storage.read(self._record.parts):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except (BlobDamaged, OSError) as error:
            self._log_damage(error)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log_damage(self, error: Exception) -> None:
        log.error("file is damaged", extra={"file": self._record.file_id, "reason": str(error)})
