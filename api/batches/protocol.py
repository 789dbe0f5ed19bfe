"""POST /v1/batches: the request, and how its parameters are read."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import MAX_ECHO_CHARS
from api.generation.protocol import DurabilityLevel, RequestModel, ResponseModel
from shared.messages import InvalidParameter

ENDPOINT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_PAIRS = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512
MAX_WINDOW_S = 7 * 86_400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([0-9]{1,6})([smhd])")


class ExpiresAfter(RequestModel):
    """When the batch's files expire."""

    anchor: str
    seconds: int


class BatchRequest(RequestModel):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None
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
    if len(metadata) > MAX_PAIRS:
        raise InvalidParameter("metadata", f"at most {MAX_PAIRS} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS:
            raise InvalidParameter("metadata", f"keys have at most {MAX_KEY_CHARS} characters")
        if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
            raise InvalidParameter(
                f"metadata.{key[:MAX_ECHO_CHARS]}",
                f"must be a string of at most {MAX_VALUE_CHARS} characters",
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
    object: Literal["list"]
    data: list[BatchLineError]


class BatchCounts(ResponseModel):
    total: Count
    completed: Count
    failed: Count


class BatchInputDetails(ResponseModel):
    cached_tokens: Count


class BatchOutputDetails(ResponseModel):
    reasoning_tokens: Count


class BatchUsage(ResponseModel):
    input_tokens: Count
    input_tokens_details: BatchInputDetails
    output_tokens: Count
    output_tokens_details: BatchOutputDetails
    total_tokens: Count


class BatchObject(ResponseModel):
    """Times are Unix seconds of the Redis clock; null: not (yet)."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
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


class BatchList(ResponseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
