"""Files and batches as the document describes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class FileForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/files, a multipart form."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)] | None = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class FileObject(msgspec.Struct):
    """Times are Unix seconds of the Redis clock."""

    id: str
    object: Literal["file"]
    bytes: Count
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchLineError(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchLineError]


class BatchCounts(msgspec.Struct):
    total: Count
    completed: Count
    failed: Count


class BatchInputDetails(msgspec.Struct):
    cached_tokens: Count


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: Count


class BatchUsage(msgspec.Struct):
    input_tokens: Count
    input_tokens_details: BatchInputDetails
    output_tokens: Count
    output_tokens_details: BatchOutputDetails
    total_tokens: Count


class BatchObject(msgspec.Struct):
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


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
