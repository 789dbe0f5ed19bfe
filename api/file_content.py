"""ContentResponse: a file's bytes, once it is certain that all of them are here."""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.blobs import BlobDamaged, BlobsUnavailable
from api.errors import ServerError
from api.files import Files, unavailable_files
from api.open_requests import OpenRequests
from shared.transport.files import FileRecord

log = logging.getLogger(__name__)


class ContentResponse(Response):
    """An ASGI response. What is found out after its begin (damage on the disk, this frontend going
    down) ends it before its announced length."""

    def __init__(self, files: Files, record: FileRecord, open_requests: OpenRequests) -> None:
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
            await self._files.blobs.check(self._record.parts)
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
            async for block in self._files.blobs.read(self._record.parts):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except (BlobDamaged, OSError) as error:
            self._log_damage(error)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log_damage(self, error: Exception) -> None:
        log.error("file is damaged", extra={"file": self._record.file_id, "reason": str(error)})
