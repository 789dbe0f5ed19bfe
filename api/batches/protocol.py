"""The requests and responses of the routes of batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import MAX_ECHO_CHARS
from api.files.service import MAX_LIFE_S, MIN_LIFE_S
from api.generation.protocol import DurabilityLevel, RequestModel
from api.generation.response_schemas import CachedTokens, ReasoningTokens, ResponseModel
from api.generation.schemas import (
    LABELS,
    MAX_LABEL_CHARS,
    MAX_LABEL_KEY_CHARS,
    MAX_LABELS,
    described,
)
from api.http.pagination import ListPage, PageQuery
from shared.messages import InvalidParameter
from shared.transport.ports.batches import BatchError, BatchRecord, BatchStatus

ENDPOINT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
MAX_WINDOW_S = 7 * 86_400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([0-9]{1,6})([smhd])")


class BatchesQuery(PageQuery):
    """GET /v1/batches."""

    limit: int = Field(20, ge=1, le=100)


class ExpiresAfter(RequestModel):
    """When the batch's files expire."""

    anchor: Annotated[str, described(enum=["created_at"])]
    seconds: Annotated[int, described(minimum=MIN_LIFE_S, maximum=MAX_LIFE_S)]


class BatchRequest(RequestModel):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, described(enum=list(ENDPOINT_PATHS))]
    completion_window: Annotated[str, described(pattern=f"^{_WINDOW.pattern}$")]
    metadata: Annotated[dict[str, Any], described(**LABELS)] | None = None
    output_expires_after: ExpiresAfter | None = None
    durability: DurabilityLevel | None = None


def window_s(text: str) -> int:
    """Returns a completion window in seconds: a whole number of s, m, h or d, up to a week.

    Raises InvalidParameter.
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise InvalidParameter("completion_window", "must be like '24h', at most '7d'")
    return seconds


def checked_metadata(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Returns the metadata, whose values are strings. Raises InvalidParameter."""
    if metadata is None:
        return None
    if len(metadata) > MAX_LABELS:
        raise InvalidParameter("metadata", f"at most {MAX_LABELS} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_LABEL_KEY_CHARS:
            raise InvalidParameter(
                "metadata", f"keys have at most {MAX_LABEL_KEY_CHARS} characters"
            )
        if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS:
            raise InvalidParameter(
                f"metadata.{key[:MAX_ECHO_CHARS]}",
                f"must be a string of at most {MAX_LABEL_CHARS} characters",
            )
    return metadata


# The responses.

Count = Annotated[int, Field(ge=0)]


class BatchLineError(ResponseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(ResponseModel):
    object: Literal["list"] = "list"
    data: list[BatchLineError]


class BatchDeleted(ResponseModel):
    id: str
    object: Literal["batch"] = "batch"
    deleted: Literal[True] = True


class BatchCounts(ResponseModel):
    total: Count
    completed: Count
    failed: Count


class BatchUsage(ResponseModel):
    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class BatchObject(ResponseModel):
    """Times are Unix seconds of the Redis clock; null: not (yet)."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> BatchObject:
        """Returns the object of a record."""
        progress, usage = record.progress, record.progress.usage
        times_ms = record.times_ms
        return cls(
            id=record.batch_id,
            endpoint=record.endpoint,
            model=progress.model,
            errors=_errors(record.errors),
            input_file_id=record.input_file_id,
            completion_window=record.window,
            status=record.status,
            output_file_id=record.output_file_id,
            error_file_id=record.error_file_id,
            created_at=record.created_ms // 1000,
            expires_at=record.expires_ms // 1000,
            in_progress_at=_seconds(times_ms.get(BatchStatus.IN_PROGRESS)),
            finalizing_at=_seconds(times_ms.get(BatchStatus.FINALIZING)),
            completed_at=_seconds(times_ms.get(BatchStatus.COMPLETED)),
            failed_at=_seconds(times_ms.get(BatchStatus.FAILED)),
            expired_at=_seconds(times_ms.get(BatchStatus.EXPIRED)),
            cancelling_at=_seconds(times_ms.get(BatchStatus.CANCELLING)),
            cancelled_at=_seconds(times_ms.get(BatchStatus.CANCELLED)),
            request_counts=BatchCounts(
                total=progress.total, completed=progress.completed, failed=progress.failed
            ),
            usage=BatchUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=ReasoningTokens(reasoning_tokens=0),
                total_tokens=usage.total_tokens,
            ),
            metadata=None if record.metadata is None else dict(record.metadata),
        )


def _errors(errors: Sequence[BatchError]) -> BatchErrors | None:
    if not errors:
        return None
    lines = [BatchLineError(**error._asdict()) for error in errors]
    return BatchErrors(data=lines)


def _seconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds // 1000


class BatchList(ListPage[BatchObject]):
    """A page of batches."""
