"""The responses of the routes of files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.generation.protocol import ResponseModel

Count = Annotated[int, Field(ge=0)]


class FileObject(ResponseModel):
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


class FileList(ResponseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]
