"""JobStore: the truth about jobs, as a frontend writes and reads it.

The semantics of all ports (atomicity, fencing, what is durable) are docs/WIRE.md's. Both sides type
against these Protocols; only the two `main` modules choose an implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from shared.messages import (
    Cursor,
    Delta,
    Durability,
    Job,
    JobEvent,
    JobState,
    OnDisconnect,
)


class TransportError(Exception):
    """The store cannot be reached or cannot answer now; the caller may retry."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a tenant may use in a minute, and what was left of that at a submit."""

    name: str  # "requests" or "tokens"
    per_minute: int
    remaining: int
    full_in_ms: int  # until all of it is left again, where nothing else is used


class QueueFull(TransportError):
    """Admission said no; nothing was written.

    `scope` says which limit: "total" and "tokens" (waiting jobs, and their prompt tokens), "memory"
    (Redis is full), "deadline" (it would wait past its own), "queue_timeout" (it would not be
    begun within it); of the job's tenant "tenant" and "tenant_tokens" (waiting), "tenant_jobs"
    (waiting or running), "requests_per_minute" and "tokens_per_minute". `allowances`: of the job's
    tenant, as in Submission.
    """

    def __init__(
        self, scope: str, retry_after_s: float, allowances: Sequence[Allowance] = ()
    ) -> None:
        super().__init__(f"queue is full ({scope})")
        self.scope = scope
        self.retry_after_s = retry_after_s
        self.allowances = allowances


class KeyTaken(Exception):
    """The job's idempotency key belongs to another job; nothing was written.

    `same_request` says whether that one came of an equal request.
    """

    def __init__(self, job_id: str, *, same_request: bool) -> None:
        super().__init__(f"the key belongs to {job_id}")
        self.job_id = job_id
        self.same_request = same_request


@dataclass(frozen=True, slots=True)
class KeptKey:
    """Which job an idempotency key belongs to, and how that is. `state` None: it is forgotten."""

    job_id: str
    body: str
    state: JobState | None

    @property
    def is_binding(self) -> bool:
        """The job lives or has finished. What failed may be tried again, as another job."""
        live = (JobState.QUEUED, JobState.RUNNING, JobState.FINISHED)
        return self.state in live


class Submitted(StrEnum):
    """What became of a submit: DUPLICATE means that the same job id is there already."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Submission:
    """A submit that was not refused, and what it left of the tenant's allowances.

    `allowances`: those that have a limit. A DUPLICATE is told and charged nothing.
    """

    outcome: Submitted
    allowances: tuple[Allowance, ...] = ()


# How long an ended job has a record or at least a tombstone (lua/lib/common.lua has the same). Only
# who was sure of a job within this time may put it back.
TOMBSTONE_MS = 600_000


class Restored(StrEnum):
    """What became of putting a job back that the server has lost."""

    RESTORED = "restored"  # it is there again, or still is
    OVER = "over"  # it has ended, or may have ended
    FENCED = "fenced"  # another attempt owns it
    NO_LEASE = "nolease"  # a worker must beat first
    NO_MEMORY = "nomemory"  # the server is above maxmemory: it may be tried again


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds that `submit` checks atomically, at the check itself. None: no bound.

    Minutes are buckets that fill up evenly. Tokens are those of the prompt and, until the job has
    ended, all that it may give; then those that it gave.
    """

    max_queued_jobs: int = 1000
    max_queued_tokens: int = 2_000_000  # prompt tokens of queued jobs
    # of the job's tenant
    max_queue_share_per_tenant: float | None = None  # of the places that are its own or free
    max_queued_jobs_per_tenant: int | None = None
    max_queued_tokens_per_tenant: int | None = None  # prompt tokens of queued jobs
    max_jobs_per_tenant: int | None = None  # queued and running
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's hash, read back. Times are milliseconds of the Redis clock; None: not yet."""

    job_id: str
    model: str
    state: JobState
    kind: str
    tenant: str
    attempt: int
    owner: str | None
    reason: str | None  # FinishReason, ErrorCode or cancel reason; None before the end
    message: str | None
    stop_reason: str | int | None
    client_request_id: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    submitted_ms: int
    started_ms: int | None
    first_token_ms: int | None
    ended_ms: int | None
    deadline_ms: int
    queue_deadline_ms: int | None = None  # until when it had to be begun; None: no such bound
    queue_position: int | None = None  # 0 is next; only while queued
    extra: Mapping[str, str] = field(default_factory=dict)  # hash fields of a newer release
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    num_choices: int = 1
    durability: Durability = Durability.NONE  # what its acceptance waits for
    sampling: Mapping[str, float] | None = None  # of RECORDED_SAMPLING; None: of an older release


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The latched state after a cancel: the cancel's own, or that of whoever came first."""

    state: JobState
    num_tokens: int
    won: bool  # True when this very call ended the job


@dataclass(frozen=True, slots=True)
class JobLook:
    """Where a job stands: enough to know whether a reader has missed something."""

    state: JobState
    end: Cursor  # of what was logged


@dataclass(frozen=True, slots=True)
class DurabilityFault:
    """Why a server cannot confirm a durability."""

    sentence: str
    is_lasting: bool  # False: it may pass by itself, as a failover or a replica's reconnect does


class JobStore(Protocol):
    """The frontend's view: submit, read, cancel, look. Every call may raise TransportError."""

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        """Raises QueueFull and KeyTaken before anything is written. Idempotent by job id.

        `reader_id`: who reads the job, "<frontend>#<n>"; "" for nobody, "<frontend>" for whichever
        reader of that frontend.
        """
        ...

    async def submit_again(self, job: Job, timeout_ms: int, reader_id: str = "") -> Restored:
        """Queues a job that was accepted before and that the server has lost; no limit holds.

        `timeout_ms`: what is left of its timeout. `reader_id`: as in `submit`. RESTORED also where
        it is there already. To be called only by who has seen the job's record, or its acceptance,
        within TOMBSTONE_MS.
        """
        ...

    async def durability_fault(
        self, durability: Durability, num_replicas: int
    ) -> DurabilityFault | None:
        """Why the server cannot confirm this durability now; None when it can."""
        ...

    async def confirm(
        self,
        kind: str,
        names: Sequence[str],
        durability: Durability,
        num_replicas: int,
        timeout_s: float,
    ) -> bool:
        """Waits once until the records of these of one kind ("job" or "batch"), and all that was
        written before, are as durable as that; False when that was not in time, or a record is
        missing."""
        ...

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        """The state of each job; None: no such job. One that has ended and whose record was removed
        counts as cancelled."""
        ...

    async def kept_key(self, key: str) -> KeptKey | None:
        """By the digest in Job.idempotency; None: no job has it (any more)."""
        ...

    async def requeue(self, letter_id: str, job: Job, limits: AdmissionLimits) -> str | None:
        """Submits `job`, which nobody waits for, in the place of a dead letter, which goes.

        The id of the job that took the letter: `job`'s, or another's that was first. None: there is
        no such letter. Raises QueueFull before anything is written.
        """
        ...

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        """Durable events strictly after `after`, in order: PromptSlice, of a job that asks for
        them, Delta, then one Finished or Failed. Slice i lies at Cursor(0, i + 1). Fewer than
        `count` only where nothing follows: entries of unknown kinds are passed over."""
        ...

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        """Where each job stands, of many at little cost; None: no such job."""
        ...

    async def get(self, job_id: str) -> JobRecord | None: ...
    async def facts(self, job_id: str) -> str | None:
        """`facts` of the job as submitted; None where it has none, or is not known any more."""
        ...

    async def list_jobs(
        self, state: JobState | None, limit: int, tenant: str | None = None
    ) -> Sequence[JobRecord]:
        """Newest first; of all states and of all tenants where they are None."""
        ...

    async def cancel(self, job_id: str, reason: str) -> CancelResult | None:
        """Latches CANCELLED unless the job has ended. None: no such job."""
        ...

    async def forget(self, job_id: str) -> bool:
        """Drops what is kept of an ended job. False: it has not ended. True also without a job."""
        ...

    async def renew(self, job_ids: Sequence[str]) -> None:
        """Keeps ended jobs that have a `retain_ms` for so long from now."""
        ...

    async def attach(self, readers: Sequence[tuple[str, str]]) -> Sequence[JobState | None]:
        """Each (job id, reader id) is there, or still there. The jobs' states; None: no such job.

        Repeat it every two seconds: a job whose marked reader has left, or whose frontend has
        died, then knows of another reader in time.
        """
        ...

    async def detach(self, job_id: str, reader_id: str) -> None: ...
    async def beat_frontend(self, frontend_id: str, lease_ms: int) -> bool:
        """Renews a frontend's lease. False: it had ended, or there was none. Its jobs may count as
        orphans soon: all its readers attach before it reaps."""
        ...

    async def reap(self) -> int:
        """Ends jobs past their deadline and, a page of them at a time, those that nobody reads any
        more; returns how many. Anybody may call it at any time, everybody each second."""
        ...

    async def shared_secret(self, purpose: str) -> bytes:
        """Random bytes that all frontends have in common; made by the first that asks, kept for a
        week after the last."""
        ...

    async def ping(self) -> float:
        """Round trip in seconds."""
        ...
