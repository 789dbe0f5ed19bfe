"""/v1/files: what batches read and write."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ServerError
from api.files.protocol import FileDeleted, FileList, FileObject, FilesQuery
from api.files.service import FilesDep, FileService, unavailable_files
from api.files.storage import BlobDamaged, BlobsUnavailable
from api.http.caller import CallerDep
from api.http.json_response import LongJsonResponse, json_response
from api.http.open_requests import OpenRequests, OpenRequestsDep
from api.http.openapi import NAMED, STORE, errors
from api.http.pagination import NO_QUERY
from api.http.time_slices import SlicesDep
from shared.transport.ports.files import FileRecord

log = logging.getLogger(__name__)

router = APIRouter(tags=["OpenAI"])

PATH = "/v1/files"
# The form is read by `api.files.upload`, which streams the file to the disk.
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
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
    return json_response(FileObject.of(await files.receive(request, caller.tenant)))


@router.get(PATH, response_model=FileList, responses=errors(STORE))
async def list_files(
    query: Annotated[FilesQuery, Query()], caller: CallerDep, files: FilesDep, slices: SlicesDep
) -> Response:
    """Lists the caller's files, newest first unless `order` is `asc`."""
    records = await files.index.list(
        caller.tenant,
        query.after,
        query.limit + 1,
        oldest_first=query.order == "asc",
        purpose=query.purpose,
    )
    return LongJsonResponse(FileList.of(records, query.limit, FileObject.of), slices)


@router.get(
    PATH + "/{file_id}", response_model=FileObject, responses=errors(NAMED), dependencies=[NO_QUERY]
)
async def get_file(file_id: str, caller: CallerDep, files: FilesDep) -> Response:
    """Returns the metadata of a file."""
    return json_response(FileObject.of(await files.get(file_id, caller.tenant)))


@router.get(
    PATH + "/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, **errors(NAMED)},
    dependencies=[NO_QUERY],
)
async def get_content(
    file_id: str, caller: CallerDep, files: FilesDep, open_requests: OpenRequestsDep
) -> Response:
    """Streams the bytes of a file. A body that ends early was damaged on the disk meanwhile."""
    record = await files.get(file_id, caller.tenant)
    return ContentResponse(files, record, open_requests)


@router.delete(PATH + "/{file_id}", response_model=FileDeleted, responses=errors(NAMED | {409}))
async def delete_file(file_id: str, caller: CallerDep, files: FilesDep) -> Response:
    """Deletes a file; 409 while a batch reads it. Its bytes are removed soon after."""
    await files.drop(file_id, caller.tenant)
    return json_response(FileDeleted(id=file_id))


class ContentResponse(Response):
    """Sends a file's bytes after a check that all of them are on the disk.

    No StreamResponse: it has an announced length, and no job, events or keep-alives. Both share
    OpenRequests. Damage that is found later, and a shutdown, end it before its length.
    """

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
        log.error(
            "a stored file is damaged", extra={"file": self._record.file_id, "reason": str(error)}
        )
