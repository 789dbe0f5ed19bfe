"""The ports of a frontend for the admission of jobs, with its limits, and for their durability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import Durability, Job, JobState
from shared.transport.ports.jobs import Allowance, JobStore, Restored, Submitted, TransportError

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


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted submit.

    `allowances`: the tenant's that have a limit, after it; () for a DUPLICATE, which is free.
    """

    outcome: Submitted
    allowances: tuple[Allowance, ...] = ()


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


class SubmittingStore(JobStore, Protocol):
    """A JobStore that also admits jobs, and ends those whose readers or frontends are gone. Every
    call may raise TransportError."""

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        """Queues a job. Idempotent by job id.

        `reader_id`: the job's reader, "<frontend>#<n>"; "" for none, "<frontend>" for any reader of
        that frontend. Raises, before anything is written, QueueFull, KeyTaken, and ValueError for
        a job id, lane, model or timeout that cannot be queued.
        """
        ...

    def partition_for(self, name: str = "", num: int = 0) -> int:
        """Returns a new job's partition: by `name`, of the first `num` if set, or the next."""
        ...

    async def submit_again(self, job: Job, timeout_ms: int, reader_id: str = "") -> Restored:
        """Queues a job that was accepted before and that the server has lost; no limit holds.

        `timeout_ms`: the rest of its timeout. `reader_id`: as in `submit`. Returns RESTORED also if
        it exists already. Call it only for a job whose record, or acceptance, was seen within
        TOMBSTONE_MS. Raises QueueFull only above maxmemory.
        """
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

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        """Returns the state of each job; None: no such job. An ended job whose record was removed
        counts as cancelled."""
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
