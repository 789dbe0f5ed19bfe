"""The ports of a frontend for jobs: the store of their records and logs, and their live events.

The semantics of all ports (atomicity, fencing, durability) are docs/WIRE.md's. Both sides type
against these Protocols; only the two `main` modules choose an implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from shared.messages import (
    Cursor,
    Delta,
    Durability,
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


class Submitted(StrEnum):
    """The outcome of a submit. DUPLICATE: the job id exists already."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


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
class JobClaim:
    """A claim of a job. `deaths`: unexplained deaths of its earlier holders until then."""

    attempt: int
    claimed_ms: int
    num_tokens: int
    deaths: int
    worker_id: str
    cause: str | None = None  # of an end that is not the job's: a ClaimEnd; None: of no such end
    last_ms: int | None = None  # its last delta, where it has a cause


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
    preemptions: int = 0  # for jobs of higher lanes
    until_ms: int | None = None  # kept until then, once it has ended; None: of an older release
    text_until_ms: int | None = None  # likewise its text
    claims: Sequence[JobClaim] = ()  # the latest 16, oldest first; none of an older release
    last_ms: int | None = None  # the last delta of the latest claim
    is_worker_lost: bool = False  # running by its state, but its worker's lease has ended
    placed: str | None = None  # it holds the "prefix", the one that does was "late", or "any" could


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
    lost_attempt: int | None = None  # while it is between workers: the claim that ended
    cause: str = ""  # of that end


class Expired(NamedTuple):
    """An ended job whose record is gone. `message`: when it expired, and why."""

    tenant: str
    kind: str
    message: str


class JobStore(Protocol):
    """The frontend's view of jobs. Every call may raise TransportError."""

    def partition_of(self, job_id: str) -> int: ...  # one may be away alone
    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        """Returns durable events strictly after `after`, in order: PromptSlice, of a job that
        requests them, Delta, then one Finished or Failed. Slice i lies at Cursor(0, i + 1).

        Fewer than `count` only where nothing follows: entries of unknown kinds are skipped. The log
        of an ended job always ends: where nothing lies after `after`, its end is returned again; in
        place of a text that has expired Failed(job_expired), of one that was lost Failed(job_lost).
        """
        ...

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        """Returns how far each job is, many in one call; None: no such job."""
        ...

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns the job's record; None: no such job."""
        ...

    async def expired(self, job_id: str) -> Expired | None:
        """Returns the notice of an ended job without a record, if it is still kept."""
        ...

    async def request_record(self, job_id: str) -> str | None:
        """Returns the job's `request_record`; None if it has none or has expired."""
        ...

    async def stored_bytes(self, job_id: str) -> int:
        """Returns about how many bytes the job's `request_record` and its log are; 0: no such
        job."""
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


# EventBus: live events of jobs, at most once. Whatever it loses is read from the job's log.


class Subscription(Protocol):
    """Live events of one job for one reader. At most once: the reader fills gaps.

    Every confirmation of the subscription by the server (first or after a reconnect) is delivered
    as RESYNC: the reader must then read the log from its cursor.
    """

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        """Returns the next event; RESYNC; or None when nothing came within `timeout_s`. One task at
        a time.

        A subscription's queue is bounded: events that do not fit are replaced by RESYNC.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """The number of events that `get` would return at once."""
        ...

    def wake(self) -> None:
        """Ends the wait of a `get`, which returns None if there is no event."""
        ...


class Resync:
    """Sentinel class: catch up from the log now."""


RESYNC = Resync()


class EventBus(Protocol):
    """At-most-once fan-out of a job's events; one multiplexed connection per process."""

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    async def subscribe(self, job_id: str) -> Subscription:
        """Returns once the server confirmed; the first get() is RESYNC. Raises TransportError."""
        ...

    async def begin(self, job_id: str) -> Subscription:
        """Subscribes without the wait; await `confirmed` before the first get()."""
        ...

    async def confirmed(self, subscription: Subscription) -> None:
        """Waits until the server confirms a subscription of `begin`. Ends the subscription if it
        raises TransportError."""
        ...

    async def unsubscribe(self, subscription: Subscription) -> None: ...
