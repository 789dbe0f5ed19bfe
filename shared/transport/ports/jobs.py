"""The ports between the two sides and whatever carries their jobs.

Both sides type against these Protocols; only the two `main` modules choose an implementation. The
semantics (atomicity, fencing, what is durable) are docs/WIRE.md's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from shared.messages import (
    START,
    Cursor,
    Delta,
    Durability,
    FinishReason,
    Job,
    JobEvent,
    JobState,
    OnDisconnect,
    PromptSlice,
    Segment,
    TokenLogprob,
    Usage,
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
class WorkerStatus:
    """A live worker's last beat."""

    worker_id: str
    models: tuple[str, ...]
    beat_age_s: float
    draining: bool
    stalled: bool
    stats: Mapping[str, float | str]  # step, waiting, prefilling, active, pending, running, ...


@dataclass(frozen=True, slots=True)
class AnnouncedModel:
    """A model whose card is stored."""

    card: bytes  # JSON
    unserved_s: float  # since its last announcement; 0.0 while a live worker serves it


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Totals of a partition, from counters that the transitions keep."""

    queued: int
    running: int
    queued_tokens: int
    totals: Mapping[str, int]  # state -> jobs that ended so
    queued_by_model: Mapping[str, int] = field(default_factory=dict)  # of announced models


class Subscription(Protocol):
    """Live events of one job for one reader. At most once: gaps are the reader's to fill.

    Every confirmation of the subscription by the server (first or after a reconnect) is delivered
    as RESYNC: the reader must then read the log from its cursor.
    """

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        """The next event; RESYNC; or None when nothing came within `timeout_s`.

        A subscription's queue is bounded: what does not fit is dropped, RESYNC comes instead.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Events that `get` would give at once."""
        ...

    def wake(self) -> None:
        """Ends the wait of a `get`, which returns None if there is nothing to give."""
        ...


class Resync:
    """Sentinel class: catch up from the log now."""


RESYNC = Resync()


class EventBus(Protocol):
    """At-most-once fan-out of a job's events; one multiplexed connection per process."""

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    async def subscribe(self, job_id: str) -> Subscription:
        """Returns once the server confirmed, or raises TransportError. First get() is RESYNC."""
        ...

    async def begin(self, job_id: str) -> Subscription:
        """As `subscribe`, without the wait: `confirmed` comes before the first get()."""
        ...

    async def confirmed(self, subscription: Subscription) -> None:
        """Returns once the server confirmed what `begin` gave. Raises TransportError, and ends the
        subscription then."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None: ...


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

    async def workers(self) -> Sequence[WorkerStatus]: ...
    async def queue_stats(self) -> QueueStats: ...
    async def models(self) -> Mapping[str, AnnouncedModel]:
        """By name: what live workers serve, and what was announced within the last day or kept."""
        ...

    async def keep_models(self, digests: Mapping[str, Sequence[str]]) -> None:
        """Keeps the cards and blobs of models (name -> digests of its blobs) for another day."""
        ...

    async def get_blob(self, digest: str) -> bytes | None: ...
    async def ping(self) -> float:
        """Round trip in seconds."""
        ...


class AppendStatus(StrEnum):
    """What the log said to an append. GAP and DIVERGED carry the log's length in AppendResult."""

    OK = "ok"
    GAP = "gap"  # the log is shorter than we thought: send again from there
    DIVERGED = "diverged"  # same length, other tokens: reload from the log
    FENCED = "fenced"  # another attempt owns the job
    GONE = "gone"  # no such job, or not this claim of it: it ended long ago, or was lost
    ENDED = "ended"  # latched already (cancelled, expired, ...)
    REJECTED = "rejected"  # malformed range or a server error for this item; see detail


@dataclass(frozen=True, slots=True)
class AppendResult:
    status: AppendStatus
    num_tokens: int = 0
    detail: str = ""
    num_bytes: int = 0  # with num_tokens: the cursor at which the log stands


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ends, said by its worker together with its last delta."""

    state: JobState  # FINISHED or FAILED
    reason: str  # FinishReason for FINISHED, ErrorCode for FAILED
    usage: Usage
    stop_reason: str | int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Append:
    """One job's part of a step: log (start..end], then end the job if `end_of_job` is given.

    `start_hash` and `end_hash` chain over the token ids up to `start` and `end` (see chain_hash;
    over their links, see chain_links, where the delta has segments).
    A job that ends without new tokens has `start == end` and no token ids; any text that was still
    held back travels in `delta.text` (then `end.num_bytes` grows alone).

    With a `prompt_slice` it says that and nothing else: the delta is empty and lies at the start.
    The first delta behind `num_prompt_slices` of them, and the end in its place, meet a gap where
    the log has fewer; a slice that is there already is left as it is.
    """

    job_id: str
    attempt: int
    delta: Delta
    start_hash: str
    end_hash: str
    end_of_job: JobEnd | None = None
    cached_tokens: int | None = None  # the first attempt's prefix hit, kept by its first append
    prompt_slice: PromptSlice | None = None
    num_prompt_slices: int = 0


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """What a log holds of one choice. With a finish reason it has ended and is not run again."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_bytes: int = 0  # of text
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A claimed job as the server stored it, for `JobQueue.restore`; opaque to its worker."""

    request: bytes
    facts: bytes
    fields: tuple[bytes, ...]  # names and values of its hash
    claimed_s: float  # when it was claimed, by the clock of ServerClock


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed job: run each of its choices from where its log ends and speak under `attempt`.

    After a first claim the outputs are empty; after a recovery they are what the log holds, in its
    order, and `segments` say whose they are (None: all of it is choice 0's).
    """

    job: Job
    attempt: int
    output_token_ids: tuple[int, ...] = ()
    output_logprobs: tuple[TokenLogprob, ...] = ()
    end: Cursor = START
    cached_tokens: int = 0
    crashes: int = 0
    segments: tuple[Segment, ...] | None = None
    logged: tuple[Delta, ...] = field(default=(), repr=False)  # the log; () where none is needed
    snapshot: JobSnapshot | None = field(default=None, compare=False, repr=False)
    prompt_slices: tuple[PromptSlice, ...] = field(default=(), repr=False)  # where a delta follows

    @property
    def choices(self) -> tuple[LoggedChoice, ...]:
        """The log by choice, one for each of the job's.

        A job of one choice ends with its log, so a single choice is never given as ended.
        """
        if self.segments is None:
            first = LoggedChoice(self.output_token_ids, self.output_logprobs, self.end.num_bytes)
            return (first, *(LoggedChoice() for _ in range(1, self.job.num_choices)))
        return _by_choice(self)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker says of itself, every few hundred milliseconds."""

    worker_id: str
    lease_ms: int
    models: tuple[str, ...]
    stats: Mapping[str, float | str]
    running: Sequence[tuple[str, int]]  # (job_id, attempt)
    draining: bool = False
    stalled: bool = False  # the engine has work and makes no step, or its device has failed


class CrashCause(StrEnum):
    """Why an engine ended, as far as its jobs are concerned."""

    ENGINE = "engine"  # unknown: any of its jobs may have killed it
    DEVICE = "device"  # an error of the device, before the engine gave a token
    PROVEN_DEVICE = "proven_device"  # an error of the device, which had worked for other jobs


@dataclass(frozen=True, slots=True)
class BeatReply:
    """Ids of the jobs to drop, and of those that the server has lost (see JobQueue.restore)."""

    dropped: Sequence[str] = ()
    lost: Sequence[str] = ()


class JobQueue(Protocol):
    """The worker's view. Every call may raise TransportError; every call is safe to repeat."""

    async def setup(self, models: Sequence[str]) -> None:
        """Creates the streams and their group (from id 0) where they are missing."""
        ...

    async def beat(self, beat: Beat) -> BeatReply:
        """Renews the lease; returns which of the listed jobs are no longer this worker's."""
        ...

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        """Takes new jobs for `count` free places, waiting up to `block_ms` for the first; claims
        each. A job takes a place for each of its choices; one is taken while a place is free, so
        the last may have more choices than places were left. Of jobs that have just come it takes
        this worker's portion and leaves the rest to others for a moment."""
        ...

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        """Takes up to `count` jobs for a worker without a free place, without waiting.

        A lane is taken in its order as long as a job of a tenant outside `leave_out` is next or
        close behind. A reply that is lost may hold claims, as with `pull`.
        """
        ...

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        """Claims again what the group says is ours and memory does not know (a lost reply)."""
        ...

    async def recover(
        self, worker_id: str, count: int, *, suspects: bool = True
    ) -> Sequence[Delivery]:
        """Takes over jobs of workers without a lease, and released ones; `count` as in `pull`.
        Without `suspects` jobs that were there at several crashes are left."""
        ...

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        """One round trip for a whole step; one result per item, in order."""
        ...

    async def restore(
        self, worker_id: str, job_id: str, attempt: int, snapshot: JobSnapshot, sure_ms: int
    ) -> Restored:
        """Puts a job back that the server has lost, as this worker's attempt.

        Its log is empty: the next append meets a gap. `sure_ms`: how long ago the server last knew
        this attempt.
        """
        ...

    async def release(self, worker_id: str, job_id: str, attempt: int) -> bool:
        """Gives a running job back to the queue with its log. False: it was not ours any more."""
        ...

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        """This worker's engine died with these (job id, attempt): gives them back, blamed as
        `recover` blames the jobs of a worker that died. One death too many ends a job. An error
        of the device is blamed on a job that was tried alone on a device that works, if on any.
        """
        ...

    async def retire(self, worker_id: str) -> None:
        """Drops the lease: whatever is still ours may be recovered at once."""
        ...

    def cancellations(self, worker_id: str) -> AsyncIterator[str]:
        """Job ids to drop, as hints (append and beat tell the same truth)."""
        ...

    async def announce(self, model: str, card: bytes, blobs: Mapping[str, bytes]) -> None:
        """Publishes the model's card and its blobs (by digest); repeat to keep them alive."""
        ...


def _by_choice(delivery: Delivery) -> tuple[LoggedChoice, ...]:
    num_choices = delivery.job.num_choices
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
    num_bytes = [0] * num_choices
    ends: dict[int, Segment] = {}
    first = 0
    for segment in delivery.segments or ():
        end = first + segment.num_tokens
        token_ids[segment.choice] += delivery.output_token_ids[first:end]
        logprobs[segment.choice] += delivery.output_logprobs[first:end]
        num_bytes[segment.choice] += segment.num_bytes
        if segment.finish_reason is not None:
            ends[segment.choice] = segment
        first = end
    nothing = Segment(0, 0, 0)
    return tuple(
        LoggedChoice(
            tuple(token_ids[choice]),
            tuple(logprobs[choice]),
            num_bytes[choice],
            ends.get(choice, nothing).finish_reason,
            ends.get(choice, nothing).stop_reason,
        )
        for choice in range(num_choices)
    )
