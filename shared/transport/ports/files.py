"""FileIndex: records of files whose bytes are on a disk that the frontends share.

api/files/storage.py keeps the bytes; the index keeps a file's tenant, its parts and its lifetime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shared.keys import new_job_id

FILE_PREFIX = "file-"


def new_file_id() -> str:
    """Returns a new id: `file-` and a job's id."""
    return FILE_PREFIX + new_job_id()


class FilePart(NamedTuple):
    """The first `num_bytes` of a blob; `sha256` is theirs, in hex."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file. Its content is that of its parts, one after the other. Times: the Redis clock."""

    file_id: str
    tenant: str
    purpose: str
    name: str  # given by its creator
    num_bytes: int
    parts: tuple[FilePart, ...]
    created_ms: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class FileUsage:
    """How much is stored: in all, and of one tenant."""

    num_files: int
    num_bytes: int
    tenant_files: int
    tenant_bytes: int


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Bounds that `put` checks atomically, at the check itself."""

    max_files: int
    max_bytes: int
    max_tenant_files: int
    max_tenant_bytes: int
    max_share_per_tenant: float | None = None  # of Redis' bytes that are its own or free


class FilesFull(Exception):
    """A limit was reached; nothing was written.

    `scope`: files, bytes, tenant_files or tenant_bytes.
    """

    def __init__(self, scope: str) -> None:
        super().__init__(f"the file limit is reached ({scope})")
        self.scope = scope


class FileInUse(Exception):
    """A batch that has not ended reads the file."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """The arguments of `put`; the store adds the times."""

    file_id: str
    tenant: str
    purpose: str
    name: str
    parts: tuple[FilePart, ...]
    life_ms: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


class FileIndex(Protocol):
    """Every call may raise TransportError; every call is safe to repeat."""

    async def put(self, file: NewFile, limits: FileLimits) -> FileRecord:
        """Raises FilesFull before anything is written. Idempotent by file id."""
        ...

    async def get(self, file_id: str, tenant: str) -> FileRecord | None:
        """Returns a file; None for one that is unknown, has expired, or is another tenant's."""
        ...

    async def list(
        self, tenant: str, after: str | None, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        """Returns files by time of creation, those that follow `after` (the id of one of them)."""
        ...

    async def drop(self, file_id: str, tenant: str) -> bool:
        """Deletes a file. Returns whether the tenant had it. Raises FileInUse."""
        ...

    async def usage(self, tenant: str) -> FileUsage: ...
    async def sweep(self, removed: Sequence[str], count: int) -> Sequence[str]:
        """Deletes files that have expired.

        Returns at most `count` names of blobs to remove from the disk, at each call until they come
        back as `removed`.
        """
        ...
