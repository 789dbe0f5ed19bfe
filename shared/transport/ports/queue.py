"""JobQueue: a worker pulls, reports and releases jobs. Deliveries are at least once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from shared.keys import NUM_LANES
from shared.messages import (
    START,
    Cursor,
    Delta,
    FinishReason,
    Job,
    JobState,
    PromptSlice,
    Segment,
    TokenLogprob,
    Usage,
)
from shared.transport.ports.deployment import Spent
from shared.transport.ports.jobs import Restored
from shared.transport.ports.registry import Order


class AppendStatus(StrEnum):
    """The verdict on an append. GAP and DIVERGED carry the log's length in AppendResult."""

    OK = "ok"
    GAP = "gap"  # the log is shorter than the worker assumed: append again from there
    DIVERGED = "diverged"  # same length, other tokens: reload from the log
    FENCED = "fenced"  # another attempt owns the job, or has ended it
    GONE = "gone"  # no such job, or not this claim of it: it ended long ago, or was lost
    ENDED = "ended"  # latched already (cancelled, expired, ...)
    REJECTED = "rejected"  # malformed range or a server error for this item; see detail


class AppendResult(NamedTuple):
    status: AppendStatus
    num_tokens: int = 0
    detail: str = ""
    num_bytes: int = 0  # with num_tokens: the cursor at which the log stands


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ends, sent by its worker together with its last delta."""

    state: JobState  # FINISHED or FAILED
    reason: str  # FinishReason for FINISHED, ErrorCode for FAILED
    usage: Usage
    stop_reason: str | int | None = None
    message: str = ""


class Append(NamedTuple):
    """One job's part of a step: logs (start..end], then ends the job if `end_of_job` is given.

    `start_hash` and `end_hash` chain over the token ids up to `start` and `end` (see chain_hash;
    over their links, see chain_links, where the delta has segments).
    A job that ends without new tokens has `start == end` and no token ids; any text that was still
    held back travels in `delta.text` (then `end.num_bytes` grows alone).

    With a `prompt_slice` it holds nothing else: the delta is empty and lies at the start.
    The first delta after `num_prompt_slices` of them (or the end without a delta) meets a gap if
    the log has fewer; a slice that exists already is not changed.
    """

    job_id: str
    attempt: int
    delta: Delta
    start_hash: str
    end_hash: str
    end_of_job: JobEnd | None = None
    cached_tokens: int | None = None  # the first attempt's prefix hit, kept by its first append
    num_lane_preemptions: int = 0  # for jobs of higher lanes, if it was preempted since the last
    prompt_slice: PromptSlice | None = None
    num_prompt_slices: int = 0

    def fault(self) -> str | None:
        """Returns why the log could not hold the item or a reader not read it; None for a sound
        one."""
        delta = self.delta
        num_tokens = delta.end.num_tokens - delta.start.num_tokens
        if self.prompt_slice is not None and (delta.end != START or self.end_of_job is not None):
            return "a slice of the prompt comes alone and first"
        if num_tokens != len(delta.token_ids):
            return "token_ids do not fill the range"
        if delta.logprobs is not None and len(delta.logprobs) != num_tokens:
            return "logprobs do not fill the range"
        try:
            num_bytes = len(delta.text.encode())
            _check_text(self)
        except UnicodeEncodeError:
            return "text is not well-formed"
        if num_bytes != delta.end.num_bytes - delta.start.num_bytes:
            return "text does not fill the range"
        return _fault_of_segments(delta) or _fault_of_end(self.end_of_job)


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """One choice's part of a log. With a finish reason it has ended and is not run again."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_bytes: int = 0  # of text
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A claimed job as the server stored it, for `JobQueue.restore`; opaque to its worker."""

    request: bytes
    request_record: bytes
    fields: tuple[bytes, ...]  # names and values of its hash
    claimed_s: float  # when it was claimed, by the clock of ServerClock


@dataclass(frozen=True, slots=True)
class LostClaim:
    """The previous claim, of a worker that did not release the job: its lease ended."""

    worker_id: str
    age_s: float  # from it to the present claim
    first_delta_age_s: float | None = None  # None: it logged nothing
    last_delta_age_s: float | None = None
    num_resumed: int | None = None  # tokens that were logged before it; None: not known any more


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed job: run each of its choices from where its log ends, and append as `attempt`.

    After a first claim the outputs are empty; after a recovery they are the log's, in its order,
    and `segments` divide them among the choices (None: all of it is choice 0's).
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
    # Seconds in the queue before the first claim; 0.0 after a later one. Measured, so not compared.
    waited_s: float = field(default=0.0, compare=False)
    num_lane_preemptions: int = 0  # for jobs of higher lanes, in earlier attempts
    # Seconds since the worker of the previous claim released it; None if it did not.
    requeued_s: float | None = field(default=None, compare=False)
    lost_claim: LostClaim | None = field(default=None, compare=False)
    is_by_prefix: bool = False  # this worker got it because it holds its prefix

    @property
    def choices(self) -> tuple[LoggedChoice, ...]:
        """The log, divided by choice.

        A job of one choice ends with its log, so a single choice has never ended here.
        """
        if self.segments is None:
            first = LoggedChoice(self.output_token_ids, self.output_logprobs, self.end.num_bytes)
            return (first, *(LoggedChoice() for _ in range(1, self.job.num_choices)))
        return _by_choice(self)


class ModelFiles(NamedTuple):
    """Digests of the files that a worker serves its model from; "": unknown, which fits any job.

    A worker gets the jobs that were prepared with its `prompt_digest`, and of those that have
    output the ones whose output its `weights_digest` computed, or the digest of the adapter that
    their model names.
    """

    prompt_digest: str = ""  # ModelCard.prompt_digest
    weights_digest: str = ""
    adapters: str = ""  # of LoRA adapters' weights, by their names in requests: a JSON object


UNKNOWN_FILES = ModelFiles()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's state, reported every few hundred milliseconds."""

    worker_id: str
    lease_ms: int
    models: tuple[str, ...]
    stats: Mapping[str, float | str]
    running: Sequence[tuple[str, int]]  # (job_id, attempt)
    draining: bool = False
    stalled: bool = False  # the engine has work and makes no step, or its device has failed
    files: ModelFiles = UNKNOWN_FILES
    spent: Sequence[Spent] = ()  # of tenants, since the last report
    order: Order = Order.SERVE  # that it follows


class ClaimEnd(StrEnum):
    """How a claim ended that did not end its job."""

    WORKER_LOST = "worker_lost"
    ENGINE_DIED = "engine_died"
    ENGINE_STALLED = "engine_stalled"
    DEVICE_LOST = "device_lost"
    UPSTREAM_LOST = "upstream_lost"
    RELEASED = "released"  # by its worker: a drain or a stop
    PREEMPTED = "preempted"  # for a job of a higher lane; its worker had no slot for it again


class CrashCause(StrEnum):
    """Why an engine ended, as far as its jobs are concerned."""

    ENGINE = "engine"  # unknown: any of its jobs may have killed it
    STALL = "stall"  # it made no progress and was killed: any of its jobs may be at fault
    DEVICE = "device"  # an error of the device, before the engine gave a token
    PROVEN_DEVICE = "proven_device"  # an error of the device, which had worked for other jobs
    UPSTREAM = "upstream"  # no server answered that computes for the worker


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Ids of the jobs to drop, and of those that the server has lost (see JobQueue.restore).

    `taken` are those of `dropped` that were claimed again: this worker's lease had ended.
    `order`: an operator's; None: none is stored, and the last one holds. `num_workers` are
    registered, `num_prefixes` are noted of this one (see JobQueue.note_prefixes). `unheard` are
    jobs of partitions that did not answer.
    """

    dropped: Sequence[str] = ()
    lost: Sequence[str] = ()
    taken: Sequence[str] = ()
    order: Order | None = None
    num_workers: int = 1
    num_prefixes: int = 0
    unheard: Sequence[str] = ()


class JobQueue(Protocol):
    """The worker's view. Every call may raise TransportError; every call is safe to repeat."""

    def is_away(self, job_id: str) -> bool:
        """Returns whether the job's partition does not answer while others do."""
        ...

    async def setup(self, models: Sequence[str]) -> None:
        """Creates the streams and their group (from id 0) where they are missing; models add up."""
        ...

    async def heartbeat(self, report: WorkerReport) -> HeartbeatReply:
        """Renews the lease; returns which of the listed jobs are no longer this worker's.

        Raises ValueError for a statistic with a reserved name.
        """
        ...

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        """Claims new jobs for `count` free places, waiting up to `block_ms` for the first.

        A job takes a slot for each of its choices; one is claimed while a slot is free, so the last
        may have more choices than slots were left. From jobs that were just queued it claims those
        whose prefixes this worker holds and its portion of the others, and leaves the rest to other
        workers for a moment. A reply that is lost may hold claims: `reconcile` finds them.
        """
        ...

    async def note_prefixes(
        self,
        worker_id: str,
        lease_ms: int,
        held: Sequence[bytes],
        lost: Sequence[bytes],
        *,
        is_first: bool,
    ) -> int | None:
        """Notes digests of prefixes (shared/prefixes.py) that this worker's cache holds, and those
        that it has lost; with `is_first` it holds no others. They last as long as the lease.

        Returns how many are noted; -1 without a lease, None where the server has no memory.
        """
        ...

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        """Takes up to `count` jobs for a worker without a free place, without waiting.

        A lane is taken in its order as long as a job of a tenant outside `leave_out` is next or
        close after it. A lost reply may hold claims, as with `pull`.
        """
        ...

    async def overtake(
        self, worker_id: str, count: int, lane: int, block_ms: int
    ) -> Sequence[Delivery]:
        """Takes up to `count` jobs from the lanes before `lane` for a worker without a free place,
        waiting up to `block_ms` for the first. For a moment new jobs are left to workers with a
        free place. A lost reply may hold claims, as with `pull`.
        """
        ...

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        """Returns jobs that this worker has claimed and does not know (a reply was lost)."""
        ...

    async def recover(
        self, worker_id: str, count: int, *, suspects: bool = True, before: int = NUM_LANES
    ) -> Sequence[Delivery]:
        """Takes over jobs of workers without a lease, and released ones; `count` as in `pull`.
        Without `suspects` jobs that were in several crashes are left, and so are those of the lane
        `before` and later ones."""
        ...

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        """Appends a whole step in one round trip; returns one result per item, in order."""
        ...

    async def restore(
        self, worker_id: str, job_id: str, attempt: int, snapshot: JobSnapshot, sure_ms: int
    ) -> Restored:
        """Puts a job back that the server has lost, as this worker's attempt.

        Its log is empty: the next append meets a gap. `sure_ms`: how long ago the server last knew
        this attempt.
        """
        ...

    async def release(
        self, worker_id: str, job_id: str, attempt: int, num_lane_preemptions: int = 0
    ) -> bool:
        """Gives a running job back to the queue with its log; `num_lane_preemptions` if that is
        because it was preempted for higher lanes. False: another attempt owns it."""
        ...

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        """This worker's engine died with these (job id, attempt): gives them back, blamed as
        `recover` blames the jobs of a worker that died. One death too many ends a job; the second
        stall does, of a job that was tried as the one suspect. An error
        of the device is blamed on a job that was tried alone on a device that works, if on any.
        """
        ...

    async def retire(self, worker_id: str, *, returns: bool = False) -> None:
        """Ends the lease: the worker's jobs may be recovered at once, without blame.

        `returns`: under the same id it serves another model next. An order that it may not have
        received waits for it; and every partition must answer, since no other worker recovers jobs
        that a living one has left there.
        """
        ...

    def cancellations(self, worker_id: str) -> AsyncIterator[str]:
        """Yields ids of jobs to drop, as hints (append and heartbeat report the same)."""
        ...

    async def announce(self, model: str, card: bytes, blobs: Mapping[str, bytes]) -> None:
        """Publishes the model's card and its blobs (by digest) for a day; repeat to keep them.

        The blobs are stored before the card can be read. Raises TransportError.
        """
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


def _check_text(item: Append) -> None:
    """Raises UnicodeEncodeError for a string with a lone surrogate."""
    for segment in item.delta.segments or ():
        if isinstance(segment.stop_reason, str):
            segment.stop_reason.encode()
    if item.end_of_job is not None:
        item.end_of_job.message.encode()
        if isinstance(item.end_of_job.stop_reason, str):
            item.end_of_job.stop_reason.encode()


def _fault_of_end(end: JobEnd | None) -> str | None:
    if end is None:
        return None
    if end.state is JobState.FINISHED:
        if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return "a finished job has the reason stop or length"
    elif end.state is not JobState.FAILED:
        return "a worker ends a job as finished or failed"
    elif not end.reason or "|" in end.reason:
        return "a failed job has an error code"
    return None


def _fault_of_segments(delta: Delta) -> str | None:
    segments = delta.segments
    if segments is None:
        return None
    all_tokens = all_bytes = 0
    for choice, num_tokens, num_bytes, finish_reason, _ in segments:
        if choice < 0 or num_tokens < 0 or num_bytes < 0:
            return "a segment has negative numbers"
        if finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            return "a choice ends by stop or length"
        all_tokens += num_tokens
        all_bytes += num_bytes
    if (all_tokens, all_bytes) != (
        delta.end.num_tokens - delta.start.num_tokens,
        delta.end.num_bytes - delta.start.num_bytes,
    ):
        return "segments do not fill the range"
    return None
