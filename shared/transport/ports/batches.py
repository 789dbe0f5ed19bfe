"""BatchStore: batches and how far they are. One frontend at a time runs a batch, under a lease.

The fence of a batch's lease is like the attempt of a job: writes under an older one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from shared.keys import HOME, new_job_id
from shared.messages import Usage
from shared.transport.ports.files import FILE_PREFIX, FilePart

BATCH_PREFIX = "batch_"


def new_batch_id() -> str:
    """Returns a new id: `batch_` and a job's id."""
    return BATCH_PREFIX + new_job_id()


def row_job_id(batch_id: str, line: int, partition: int = HOME) -> str:
    """Returns the id of the job of a line of the batch's input, the same for every owner."""
    _, _, name = batch_id.removeprefix(BATCH_PREFIX).partition("-")
    return f"{partition}-{name}_{line}"


def output_file_id(batch_id: str, ending: str) -> str:
    """Returns the id of the batch's output (or error) file, the same for every owner."""
    return f"{FILE_PREFIX}{batch_id.removeprefix(BATCH_PREFIX)}_{ending}"


class BatchStatus(StrEnum):
    """The states of a batch, named as in OpenAI's API."""

    # lua/lib/batches.lua has their order.

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OVER = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


NO_USAGE = Usage(0, 0, 0)


class BatchError(NamedTuple):
    """Why a batch failed, of one line of its input where that is to blame."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a batch, which a new owner resumes.

    Every line before `low_line` (the first is 1) is done, and `low_offset` is its first byte; bit
    i of `done_bits` is set when line `low_line + i` is done too. Done: its result is in the first
    bytes of the parts, which are on disk.
    """

    total: int = 0  # rows
    completed: int = 0
    failed: int = 0
    low_line: int = 1
    low_offset: int = 0
    done_bits: int = 0
    model: str | None = None  # that all rows name
    usage: Usage = NO_USAGE
    output: tuple[FilePart, ...] = ()
    error_output: tuple[FilePart, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch's hash, read back. Times are milliseconds of the Redis clock, by status."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    window: str
    metadata: Mapping[str, str] | None
    created_ms: int
    expires_ms: int
    status: BatchStatus
    times_ms: Mapping[BatchStatus, int]
    progress: BatchProgress
    num_partitions: int = 0  # that its rows are spread over; 0: not known, of an older release
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()


@dataclass(frozen=True, slots=True)
class NewBatch:
    """The arguments of `create`."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    window: str
    window_ms: int
    metadata: Mapping[str, str] | None
    output_life_ms: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds that `create` checks atomically, and how long an ended batch's record is kept."""

    max_open: int
    max_tenant_open: int
    max_tenant_records: int
    keep_ms: int
    max_share_per_tenant: float | None = None  # of Redis' bytes that are its own or free


class BatchesFull(Exception):
    """Too many batches have not ended. `scope`: total or tenant."""

    def __init__(self, scope: str) -> None:
        super().__init__(f"too many open batches ({scope})")
        self.scope = scope


class BatchOpen(Exception):
    """The batch has not ended."""

    def __init__(self, status: BatchStatus) -> None:
        super().__init__(f"the batch has not ended ({status})")
        self.status = status


class NoInput(Exception):
    """There is no such file of this tenant, or it is of another `purpose`."""

    def __init__(self, purpose: str | None = None) -> None:
        super().__init__("no input file" if purpose is None else f"a file for {purpose}")
        self.purpose = purpose


class LeaseLost(Exception):
    """Another frontend runs the batch now, or the batch has ended."""


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """The right to run a batch until it is given back, ended, or claimed by another frontend.

    `fence` counts the batch's claims: a call with an older one raises LeaseLost.
    """

    batch_id: str
    fence: int


class Saved(NamedTuple):
    """The status that counts, and the milliseconds until the batch expires."""

    status: BatchStatus
    left_ms: int


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How the owner ends its batch. `useless`: names of blobs to be removed."""

    status: BatchStatus
    errors: tuple[BatchError, ...] = ()
    output: tuple[FilePart, ...] = ()
    error_output: tuple[FilePart, ...] = ()
    useless: Sequence[str] = field(default_factory=tuple)


class BatchStore(Protocol):
    """Every call may raise TransportError; every call is safe to repeat."""

    async def create(self, batch: NewBatch, limits: BatchLimits) -> BatchRecord:
        """Raises NoInput and BatchesFull before anything is written. Idempotent by batch id."""
        ...

    async def get(self, batch_id: str, tenant: str | None = None) -> BatchRecord | None:
        """Returns a batch; None for an unknown one, or for another tenant's where one is given."""
        ...

    async def list(self, tenant: str, after: str | None, limit: int) -> Sequence[BatchRecord]:
        """Returns batches, newest first, that follow `after` (the id of a batch of this tenant)."""
        ...

    async def list_open(self, limit: int) -> Sequence[BatchRecord]:
        """Returns batches of all tenants that have not ended, newest first."""
        ...

    async def cancel(self, batch_id: str, tenant: str) -> bool:
        """Requests the end of a batch that has not ended. Returns whether the tenant has it."""
        ...

    async def drop(self, batch_id: str, tenant: str) -> bool:
        """Deletes the record of a batch; its files stay. Returns whether the tenant had it. Raises
        BatchOpen where it has not ended."""
        ...

    async def claim(
        self, frontend_id: str, lease_ms: int, unwanted: Sequence[str]
    ) -> BatchClaim | None:
        """Returns the lease of a batch without an owner; None if only unwanted ones have none."""
        ...

    async def save(
        self,
        claim: BatchClaim,
        lease_ms: int,
        progress: BatchProgress | None = None,
        *,
        status: BatchStatus | None = None,
        job_ids: Sequence[str] = (),
    ) -> Saved:
        """Renews the lease (0: gives it back) and stores the progress; None: as before.

        `job_ids`: of rows whose results are saved with this. Raises LeaseLost.
        """
        ...

    async def end(self, claim: BatchClaim, end: BatchEnd) -> BatchStatus:
        """Ends the batch; returns the status it ended with. Raises LeaseLost."""
        ...
