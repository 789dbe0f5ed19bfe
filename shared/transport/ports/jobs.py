"""The ports of a frontend for jobs: the store, and confirmations of durability.

The semantics of all ports (atomicity, fencing, durability) are docs/WIRE.md's. Both sides type
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
    """The server cannot be reached or cannot answer now; a later try may succeed."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A tenant's allowance for a minute, and its rest after a submit."""

    name: str  # "requests" or "tokens"
    per_minute: int
    remaining: int
    full_in_ms: int  # until all of it is left again, where nothing else is used


STORE_SCOPES = frozenset(("store", "tenant_store"))


class QueueFull(TransportError):
    """Admission refused a job; nothing was written.

    `scope` names the limit: "total" and "tokens" (waiting jobs, and their prompt tokens), "memory"
    (Redis is full), "store" (Redis has only its reserve left, which is for small jobs that keep
    nothing after their end), "deadline" (it would wait past its own), "queue_timeout" (it would
    not start within it); of the job's tenant "tenant" and "tenant_tokens" (waiting), "tenant_jobs"
    (waiting or running), "tenant_store" (its share of Redis' memory), "requests_per_minute" and
    "tokens_per_minute". `allowances`: of the job's tenant, as in Submission.
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

    `same_request`: the other job came of an equal request.
    """

    def __init__(self, job_id: str, *, same_request: bool) -> None:
        super().__init__(f"the key belongs to {job_id}")
        self.job_id = job_id
        self.same_request = same_request


@dataclass(frozen=True, slots=True)
class KeptKey:
    """The job that an idempotency key belongs to; its record has expired where `state` is None."""

    job_id: str
    body: str
    state: JobState | None

    @property
    def is_binding(self) -> bool:
        """Whether the job lives or has finished. What failed may be tried again, as another job."""
        live = (JobState.QUEUED, JobState.RUNNING, JobState.FINISHED)
        return self.state in live


class Submitted(StrEnum):
    """The outcome of a submit. DUPLICATE: the job id exists already."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted submit.

    `allowances`: the tenant's that have a limit, after it; () for a DUPLICATE, which is free.
    """

    outcome: Submitted
    allowances: tuple[Allowance, ...] = ()


# How long an ended job has a record or at least a tombstone (lua/lib/common.lua has the same). A
# job that was last seen alive within this time may be restored.
TOMBSTONE_MS = 600_000
MAX_BLIND_S = TOMBSTONE_MS / 1000 / 2  # then a job may have ended unseen
PATIENCE_S = 3.0  # for the worker that runs a lost job: it puts it back together with its log


class Restored(StrEnum):
    """The outcome of putting a job back that the server has lost."""

    RESTORED = "restored"  # it exists again, or still exists
    OVER = "over"  # it has ended, or may have ended
    FENCED = "fenced"  # another attempt owns it
    NO_LEASE = "nolease"  # a worker must send a heartbeat first
    NO_MEMORY = "nomemory"  # the server is above maxmemory: it may be tried again


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds that `submit` checks and applies in one atomic step. None: no bound.

    Allowances per minute are buckets that refill evenly. Tokens are those of the prompt and, until
    the job has ended, all that it may generate; then those that it generated.
    """

    max_queued_jobs: int = 1000
    max_queued_tokens: int = 2_000_000  # prompt tokens of queued jobs
    # of the job's tenant
    max_queue_share_per_tenant: float | None = None  # of the places that are its own or free
    max_store_share_per_tenant: float | None = None  # of the bytes that are its own or free
    max_queued_jobs_per_tenant: int | None = None
    max_queued_tokens_per_tenant: int | None = None  # prompt tokens of queued jobs
    max_jobs_per_tenant: int | None = None  # queued and running
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class JobClaim:
    """A claim of a job. `deaths`: unexplained deaths of its earlier holders until then."""

    attempt: int
    claimed_ms: int
    num_tokens: int
    deaths: int
    worker_id: str


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
    queue_deadline_ms: int | None = None  # by when it had to be claimed; None: no such bound
    queue_position: int | None = None  # 0 is next; only while queued
    extra: Mapping[str, str] = field(default_factory=dict)  # hash fields of a newer release
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    num_choices: int = 1
    durability: Durability = Durability.NONE  # that its acceptance waits for
    sampling: Mapping[str, float] | None = None  # of RECORDED_SAMPLING; None: of an older release
    deaths: int = 0  # unexplained ones of workers that held it
    claims: Sequence[JobClaim] = ()  # the latest 16, oldest first; none of an older release


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The final state after a cancel: CANCELLED, or the state in which the job had ended."""

    state: JobState
    num_tokens: int
    won: bool  # True when this very call ended the job


@dataclass(frozen=True, slots=True)
class JobLook:
    """How far a job is: enough to know whether its reader has missed something."""

    state: JobState
    end: Cursor  # of the log


class JobStore(Protocol):
    """The frontend's view of jobs. Every call may raise TransportError."""

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        """Queues a job. Idempotent by job id.

        `reader_id`: the job's reader, "<frontend>#<n>"; "" for none, "<frontend>" for any reader of
        that frontend. Raises, before anything is written, QueueFull, KeyTaken, and ValueError for
        a job id, lane, model or timeout that cannot be queued.
        """
        ...

    async def submit_again(self, job: Job, timeout_ms: int, reader_id: str = "") -> Restored:
        """Queues a job that was accepted before and that the server has lost; no limit holds.

        `timeout_ms`: the rest of its timeout. `reader_id`: as in `submit`. Returns RESTORED also if
        it exists already. Call it only for a job whose record, or acceptance, was seen within
        TOMBSTONE_MS. Raises QueueFull only above maxmemory.
        """
        ...

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        """Returns the state of each job; None: no such job. An ended job whose record was removed
        counts as cancelled."""
        ...

    async def kept_key(self, key: str) -> KeptKey | None:
        """Returns the job of a key, by the digest in Job.idempotency; None: no job has it."""
        ...

    async def requeue(self, dead_letter_id: str, job: Job, limits: AdmissionLimits) -> str | None:
        """Replaces a dead letter by a new job without a reader.

        Returns the id of the job that took the dead letter: `job`'s, or that of an earlier requeue.
        None: no such dead letter. Raises QueueFull and ValueError as `submit`.
        """
        ...

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        """Returns durable events strictly after `after`, in order: PromptSlice, of a job that
        requests them, Delta, then one Finished or Failed. Slice i lies at Cursor(0, i + 1).

        Fewer than `count` only where nothing follows: entries of unknown kinds are skipped. The log
        of an ended job always ends: where nothing lies after `after`, its end is returned again,
        and Failed(job_lost) to a reader whose text is no longer stored.
        """
        ...

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        """Returns how far each job is, many in one call; None: no such job."""
        ...

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns the job's record; None: no such job."""
        ...

    async def request_record(self, job_id: str) -> str | None:
        """Returns the job's `request_record`; None if it has none or has expired."""
        ...

    async def stored_bytes(self, job_id: str) -> int:
        """Returns about how many bytes the job's `request_record` and its log are; 0: no such
        job."""
        ...

    async def list_jobs(
        self, state: JobState | None, limit: int, tenant: str | None = None
    ) -> Sequence[JobRecord]:
        """Returns records newest first, of all states and of all tenants where they are None.

        Live jobs come first, by deadline, the queued with their positions; then ended ones (the
        last thousand of each state, or of the tenant) by their end. `limit` is capped at 1000.
        """
        ...

    async def cancel(self, job_id: str, reason: str) -> CancelResult | None:
        """Latches CANCELLED unless the job has ended; None: no such job.

        `reason`: a code of small letters and '_'. Raises ValueError for others.
        """
        ...

    async def forget(self, job_id: str) -> bool:
        """Deletes the records of an ended job; False if it has not ended. Idempotent."""
        ...

    async def renew(self, job_ids: Sequence[str]) -> None:
        """Keeps ended jobs that have a `retain_ms` for as long again from now."""
        ...

    async def attach(self, readers: Sequence[tuple[str, str]]) -> Sequence[JobState | None]:
        """Registers readers, each a (job id, reader id). Returns the jobs' states; None: no such
        job.

        Repeat it every two seconds: a job whose marked reader has left, or whose frontend has died,
        then has another reader in time.
        """
        ...

    async def detach(self, job_id: str, reader_id: str) -> None:
        """Removes a reader; without another one the job's grace starts."""
        ...

    async def frontend_heartbeat(self, frontend_id: str, lease_ms: int) -> bool:
        """Renews a frontend's lease. False: it had ended or did not exist; all its readers must
        attach before it reaps, or their jobs count as orphans."""
        ...

    async def reap(self) -> int:
        """Ends jobs past their deadline and, a page at a time, jobs whose readers are gone; returns
        how many. Every frontend calls it each second; concurrent calls are safe."""
        ...

    async def shared_secret(self, purpose: str) -> bytes:
        """Returns 32 random bytes that all frontends share; created by the first call, kept for a
        week after the last."""
        ...

    async def ping(self) -> float:
        """Returns the round trip time in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class DurabilityFault:
    """Why a server cannot confirm a durability."""

    sentence: str
    is_lasting: bool  # False: it may pass by itself, as a failover or a replica's reconnect does


class DurabilityChecks(Protocol):
    """Confirms that accepted work is on the server's disk, or at its replicas.

    Every call may raise TransportError.
    """

    async def durability_fault(
        self, durability: Durability, num_replicas: int
    ) -> DurabilityFault | None:
        """Returns why the server cannot confirm this durability now; None when it can."""
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
        written before, are as durable as that. Returns False when that was not in time
        (`timeout_s`, at most 10), or a record is missing."""
        ...
