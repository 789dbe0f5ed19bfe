"""Files: uploads and outputs of batches. Bytes are in FileStorage, records in the FileIndex."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Annotated

from starlette.requests import Request

from api.dependencies import provided
from api.errors import MAX_ECHO_CHARS, ApiError, UnavailableError
from api.files.storage import BlobsUnavailable, BlobWriter, FileStorage
from api.files.upload import Upload, UploadLimits, receive_upload, too_large
from api.http.open_requests import OpenRequests
from api.http.shares import SHARE, Pot
from api.request_errors import ClientError
from shared.messages import InvalidParameter
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.files import (
    FileIndex,
    FileInUse,
    FileLimits,
    FileRecord,
    FilesFull,
    FileUsage,
    NewFile,
    new_file_id,
)
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

RETRY_S = 0.1
CHECK_S = 2.0
MAX_UPLOADS = 16  # at once, by one frontend
RETRY_AFTER_S = 5.0
SWEEP_PAGE = 256
ORPHANS_EVERY_S = 3600.0
MIN_LIFE_S = 3600
MAX_LIFE_S = 2_592_000  # 30 days; both as OpenAI has them for expires_after


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """Bounds of one deployment."""

    limits: FileLimits
    upload: UploadLimits
    life_s: int


class FileService:
    """The files of one deployment, as one frontend reads and writes them."""

    def __init__(
        self,
        index: FileIndex,
        storage: FileStorage,
        policy: FilePolicy,
        open_requests: OpenRequests,
        share: float = SHARE,
    ) -> None:
        self.storage = storage
        self.index = index
        self._policy = policy
        self._open_requests = open_requests
        self._checking: asyncio.Task[None] | None = None
        self.uploads = Pot(
            "uploads",
            MAX_UPLOADS,
            share,
            what="concurrent uploads",
            full="Too many concurrent uploads.",
            retry_after_s=RETRY_AFTER_S,
        )
        self._removed: list[str] = []
        self._unconfirmed: dict[str, str] = {}  # files that may have no record -> their tenants
        self._orphans_s = -ORPHANS_EVERY_S

    async def start(self) -> None:
        """Checks the directory; waits at most CHECK_S for a disk that does not respond."""
        self._checking = asyncio.create_task(self.storage.check_directory())
        await asyncio.wait((self._checking,), timeout=CHECK_S)

    def close(self) -> None:
        self.storage.close()

    async def receive(self, request: Request, tenant: str) -> FileRecord:
        """Stores the upload of a request. Raises ApiError, InvalidParameter, TransportError."""
        try:
            with self.uploads.take(), self._open_requests.enter() as opened:
                await self._check_quota(request, tenant)
                file_id = new_file_id()
                writer = await self.storage.create(file_id, whole=True)
                try:
                    upload = await receive_upload(
                        request, writer, self._policy.upload, lambda: opened.is_cut
                    )
                    return await self._store(file_id, tenant, upload, writer)
                finally:
                    await writer.aclose()
        except BlobsUnavailable as error:
            raise unavailable_files(str(error)) from error
        except OSError as error:
            log.error("failed to store an upload", extra={"reason": str(error)})
            raise unavailable_files("The file could not be written.") from error

    async def get(self, file_id: str, tenant: str) -> FileRecord:
        """Returns a file of the tenant. Raises ClientError (404)."""
        record = await self.index.get(file_id, tenant)
        if record is None:
            raise file_not_found(file_id)
        return record

    async def drop(self, file_id: str, tenant: str) -> None:
        """Deletes a file of the tenant. Raises ClientError (404; 409 while a batch reads it)."""
        try:
            if not await self.index.drop(file_id, tenant):
                raise file_not_found(file_id)
        except FileInUse:
            raise ClientError(
                "The file is the input of a batch that has not ended.",
                status=409,
                code="file_in_use",
                param="file_id",
                should_retry=False,
            ) from None

    async def sweep(self) -> None:
        """Removes the blobs of files that have expired, were deleted or were not recorded."""
        await self.storage.check_directory()
        if not self.storage.is_available:
            return
        for file_id, tenant in list(self._unconfirmed.items()):
            if await self.index.get(file_id, tenant) is None:
                await self.storage.remove([file_id])
            del self._unconfirmed[file_id]
        while names := await self.index.sweep(self._removed, SWEEP_PAGE):
            removed = await self.storage.remove(names)
            self._removed = removed
            if not removed:
                break
        else:
            self._removed = []
        if time.monotonic() - self._orphans_s >= ORPHANS_EVERY_S:
            self._orphans_s = time.monotonic()
            if num_removed := await self.storage.remove_orphans():
                log.info("removed blobs without a file record", extra={"count": num_removed})

    async def _check_quota(self, request: Request, tenant: str) -> None:
        """Refuses by the announced length, before anything is written. Raises ApiError."""
        announced = request.headers.get("content-length", "")
        size = int(announced[:20]) if announced.isascii() and announced.isdigit() else 0
        usage = await self.index.usage(tenant)
        limits = self._policy.limits
        if scope := _overrun(usage, limits, size):
            raise quota_exceeded(scope)

    async def _store(
        self, file_id: str, tenant: str, upload: Upload, writer: BlobWriter
    ) -> FileRecord:
        _check_purpose(upload.fields.get("purpose"))
        life_s = _life_s(upload.fields, self._policy.life_s)
        if writer.num_bytes > self._policy.upload.max_bytes:
            raise too_large(self._policy.upload.max_bytes)
        part = await writer.commit()
        new = NewFile(
            file_id=file_id,
            tenant=tenant,
            purpose="batch",
            name=upload.file_name,
            parts=(part,),
            life_ms=life_s * 1000,
        )
        try:
            return await self._put(new)
        except FilesFull as error:
            await self.storage.remove([part.name])
            raise quota_exceeded(error.scope) from None
        except QueueFull:  # Redis has no memory: there is no record
            await self.storage.remove([part.name])
            raise
        except TransportError:
            self._unconfirmed[file_id] = tenant
            raise

    async def _put(self, new: NewFile) -> FileRecord:
        try:
            return await self.index.put(new, self._policy.limits)
        except TransportError:  # the record may exist: repeat the call under the same id
            await asyncio.sleep(RETRY_S)
            return await self.index.put(new, self._policy.limits)


def parse_life_s(anchor: object, seconds: object, param: str) -> int:
    """Returns the seconds of an `expires_after` parameter. Raises InvalidParameter."""
    if anchor != "created_at":
        raise InvalidParameter(f"{param}.anchor", "must be 'created_at'")
    if not isinstance(seconds, int) or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        raise InvalidParameter(f"{param}.seconds", f"must be between {MIN_LIFE_S} and {MAX_LIFE_S}")
    return seconds


def file_not_found(file_id: str) -> ApiError:
    return ClientError(
        f"No file '{file_id[:MAX_ECHO_CHARS]}': it never existed, or it has expired.",
        status=404,
        code="file_not_found",
        param="file_id",
    )


def unavailable_files(message: str) -> UnavailableError:
    """Returns a 503: this frontend cannot reach the disk. Another one may."""
    return UnavailableError(
        503,
        message,
        kind="service_unavailable",
        code="files_unavailable",
        retry_after_s=RETRY_AFTER_S,
        should_retry=False,
    )


def quota_exceeded(scope: str) -> ApiError:
    """Returns a 403 for the tenant's quota, a 503 for that of the deployment."""
    if scope.startswith("tenant"):
        return ClientError(
            "Your quota of files or bytes is used up. Delete files.",
            status=403,
            code="file_quota_exceeded",
        )
    return UnavailableError(
        503,
        "The storage for files is full. Try again later.",
        kind="overloaded_error",
        code="files_full",
        retry_after_s=RETRY_AFTER_S,
        should_retry=False,
    )


def _overrun(usage: FileUsage, limits: FileLimits, size: int) -> str | None:
    # The announced length includes the form around the file.
    size = max(0, size - 1024)
    if usage.num_files + 1 > limits.max_files:
        return "files"
    if usage.num_bytes + size > limits.max_bytes:
        return "bytes"
    if usage.tenant_files + 1 > limits.max_tenant_files:
        return "tenant_files"
    if usage.tenant_bytes + size > limits.max_tenant_bytes:
        return "tenant_bytes"
    return None


def _check_purpose(purpose: str | None) -> None:
    if purpose is None:
        raise InvalidParameter(
            "purpose", "Missing required parameter: 'purpose'.", "missing_required_parameter"
        )
    if purpose != "batch":
        raise InvalidParameter("purpose", "must be 'batch'")


def _life_s(fields: dict[str, str], default_s: int) -> int:
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit()
    whole = int(seconds[:10]) if seconds is not None and is_number else None
    return parse_life_s(anchor, whole, "expires_after")


FilesDep = Annotated[FileService, provided(FileService)]
