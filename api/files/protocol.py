"""The queries and responses of the routes of files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.generation.response_schemas import ResponseModel
from api.http.openapi import Absent
from api.http.pagination import ListPage, PageQuery
from shared.transport.ports.files import FileRecord

MAX_LIMIT = 10_000
# Declared only: a query for another purpose finds nothing.
Purpose = Annotated[str, Field(json_schema_extra={"enum": ["batch", "batch_output"]})]


class FilesQuery(PageQuery):
    """GET /v1/files."""

    purpose: Purpose | Absent = None
    order: Literal["asc", "desc"] = "desc"
    limit: int = Field(MAX_LIMIT, ge=1, le=MAX_LIMIT)


class FileObject(ResponseModel):
    """A file. Times are Unix seconds of the Redis clock."""

    id: str
    object: Literal["file"] = "file"
    bytes: Annotated[int, Field(ge=0)]
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        """Returns the object of a record."""
        return cls(
            id=record.file_id,
            bytes=record.num_bytes,
            created_at=record.created_ms // 1000,
            expires_at=record.expires_ms // 1000,
            filename=record.name,
            purpose=record.purpose,
        )


class FileList(ListPage[FileObject]):
    """A page of files."""


class FileDeleted(ResponseModel):
    """The response to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
