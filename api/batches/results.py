"""Result lines of a batch: their JSON, and the output and error files they are appended to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError
from api.files.storage import BlobWriter, FileStorage
from api.generation.ignored_parameters import HEADER as IGNORED_HEADER
from api.http.sse import json_bytes, json_pieces
from shared.messages import Usage
from shared.transport.ports.batches import NO_USAGE
from shared.transport.ports.files import FilePart


@dataclass(frozen=True, slots=True)
class RowResult:
    """The outcome of one line. Without `text` nothing is written for it."""

    line: int
    job_id: str | None = None  # whose record is no longer needed
    text: bytes | None = None
    is_success: bool = False
    usage: Usage = NO_USAGE


def output_pieces(
    custom_id: str, job_id: str, request_id: str, body: Any, ignored: str | None
) -> Iterator[bytes]:
    """Yields the output line of a completed row, which may be long, in pieces.

    `ignored` names the ignored parameters, as the header of an HTTP response does.
    """
    response = _response(200, request_id, body, ignored)
    yield from json_pieces(_payload(custom_id, job_id, response))
    yield b"\n"


def error_line(
    custom_id: str, job_id: str, request_id: str, error: ApiError, ignored: str | None
) -> bytes:
    """Returns the error line of a row that failed. `ignored` as in `output_pieces`."""
    response = _response(error.status, request_id, error.body(), ignored)
    return json_bytes(_payload(custom_id, job_id, response)) + b"\n"


def expiry_line(custom_id: str, job_id: str) -> bytes:
    """Returns the error line of a row that did not run before the batch expired."""
    message = "This request could not be executed before the completion window expired."
    error = {"code": "batch_expired", "message": message}
    return json_bytes(_payload(custom_id, job_id, None, error)) + b"\n"


def _response(status: int, request_id: str, body: Any, ignored: str | None) -> dict[str, Any]:
    headers = {} if ignored is None else {"headers": {IGNORED_HEADER: ignored}}
    return {"status_code": status, "request_id": request_id, **headers, "body": body}


def _payload(custom_id: str, job_id: str, response: Any, error: Any = None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{job_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


class ResultFile:
    """One part per owner of the batch; this owner's part grows.

    An owner never writes to another's part. What an owner writes after it lost its lease stands
    after the last byte that was saved, and is never read.
    """

    def __init__(self, storage: FileStorage, earlier: Sequence[FilePart], name: str) -> None:
        self._storage = storage
        self._earlier = tuple(earlier)
        self._name = name
        self._writer: BlobWriter | None = None

    @property
    def parts(self) -> tuple[FilePart, ...]:
        if self._writer is None or not self._writer.num_bytes:
            return self._earlier
        return (*self._earlier, self._writer.part)

    async def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines and syncs them to the disk. Raises OSError, BlobsUnavailable."""
        if not lines:
            return
        if self._writer is None:
            self._writer = await self._storage.create(self._name, whole=False)
        await self._writer.append(lines)
        await self._writer.sync()

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
