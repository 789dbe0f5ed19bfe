"""Lines of a batch's output and error files, and the file that grows by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError
from api.files.storage import Blobs, BlobWriter
from api.generation.ignored_parameters import HEADER as IGNORED_HEADER
from api.sse import json_bytes, json_pieces
from shared.messages import Usage
from shared.transport.ports.batches import NO_USAGE
from shared.transport.ports.files import FilePart


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of one line. Without `text` nothing is written about it."""

    line: int
    job_id: str | None = None  # that has done its duty
    text: bytes | None = None
    is_success: bool = False
    usage: Usage = NO_USAGE


def answer_pieces(
    custom_id: str, job_id: str, request_id: str, body: Any, ignored: str | None
) -> Iterator[bytes]:
    """Yields the line of a row that was answered, which may be long. `ignored`: as the header of
    an HTTP answer names the members that were."""
    response = _response(200, request_id, body, ignored)
    yield from json_pieces(_payload(custom_id, job_id, response, None))
    yield b"\n"


def refusal_line(
    custom_id: str, job_id: str, request_id: str, error: ApiError, ignored: str | None
) -> bytes:
    """Returns the line of a row that an HTTP request would have got this error for. `ignored`: as
    in `answer_pieces`."""
    response = _response(error.status, request_id, error.body(), ignored)
    return _line(custom_id, job_id, response, None)


def expiry_line(custom_id: str, job_id: str) -> bytes:
    """A row that the batch had no time for."""
    said = "This request could not be executed before the completion window expired."
    return _line(custom_id, job_id, None, {"code": "batch_expired", "message": said})


def _response(status: int, request_id: str, body: Any, ignored: str | None) -> dict[str, Any]:
    headers = {} if ignored is None else {"headers": {IGNORED_HEADER: ignored}}
    return {"status_code": status, "request_id": request_id, **headers, "body": body}


def _line(custom_id: str, job_id: str, response: Any, error: Any) -> bytes:
    return json_bytes(_payload(custom_id, job_id, response, error)) + b"\n"


def _payload(custom_id: str, job_id: str, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{job_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


class ResultFile:
    """What owners of a batch wrote, one part each; this owner's part grows.

    An owner never writes to a part of another: one that was taken for dead and still writes does so
    behind the last byte that counts.
    """

    def __init__(self, blobs: Blobs, earlier: Sequence[FilePart], name: str) -> None:
        self._blobs = blobs
        self._earlier = tuple(earlier)
        self._name = name
        self._writer: BlobWriter | None = None

    @property
    def parts(self) -> tuple[FilePart, ...]:
        if self._writer is None or not self._writer.num_bytes:
            return self._earlier
        return (*self._earlier, self._writer.part)

    async def append(self, lines: Sequence[bytes]) -> None:
        """Returns when they would survive a loss of power. Raises OSError, BlobsUnavailable."""
        if not lines:
            return
        if self._writer is None:
            self._writer = await self._blobs.create(self._name, whole=False)
        await self._writer.append(lines)
        await self._writer.sync()

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
