"""A job and a dead letter as HTTP shows them, and the queries of their lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from api.generation.formatter import usage_payload
from api.generation.models import ServedModel
from api.generation.response_schemas import ResponseModel, UsageObject
from api.http.caller import Caller
from api.http.openapi import Absent
from api.http.pagination import Flag, ListQuery, QueryModel
from api.ids import public_id, without_prefix
from api.jobs.prefix import JobPrefix
from shared.messages import (
    Delta,
    Durability,
    Failed,
    Finished,
    JobEvent,
    JobState,
    PromptSlice,
    Usage,
)
from shared.transport.ports.dead_letters import DeadLetter
from shared.transport.ports.job_search import JobFilter, JobPage
from shared.transport.ports.jobs import JobRecord
from shared.transport.ports.queue import ClaimEnd

DEFAULT_LIMIT = 20
MAX_EVENTS = 256
MAX_EVENT_CHARS = 2000
MAX_LIMIT = 1000
MAX_NAME_CHARS = 256
CURSOR = r"^(live|ended)\.[0-9]{1,16}\.[0-9]{1,2}-[0-9A-Za-z_-]{1,64}$"
NO_ID = "/"  # which no job's id has
_EARLIER = {"completed": JobState.FINISHED}  # what earlier releases called a state


def from_earlier(word: Any) -> Any:
    """Returns this release's word for a state."""
    return _EARLIER.get(word, word)


class DeadLetterQuery(ListQuery):
    """The query of GET /v1/dead-letters."""

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class JobFilters(QueryModel):
    """Filters of jobs. A state's word is the same here as in the store."""

    state: Annotated[JobState, BeforeValidator(from_earlier)] | Absent = None
    tenant: Name | Absent = Field(None, description="Jobs of this tenant.")
    model: Name | Absent = Field(None, description="Jobs for this model.")
    error: Name | Absent = Field(None, description="Jobs that ended with this error code.")
    id: Name | Absent = Field(
        None,
        description="Jobs whose id begins or ends so; the prefix of a response's id counts not.",
    )

    def wanted(self, caller: Caller) -> JobFilter:
        """Returns the filter of what `caller` may see of it."""
        return job_filter(caller, self.state, self.tenant, self.model, self.error, self.id)


def job_filter(
    caller: Caller,
    state: JobState | None,
    tenant: str | None,
    model: str | None,
    error: str | None,
    id_part: str | None,
) -> JobFilter:
    """Returns the filter of what `caller` may see of the jobs that are asked for."""
    if caller.scope is not None and tenant not in (None, caller.scope):
        id_part = NO_ID
    if id_part is not None:
        id_part = without_prefix(id_part)
    return JobFilter(state, caller.scope or tenant, model, error, id_part)


class JobListQuery(ListQuery, JobFilters):
    """The query of GET /v1/jobs."""

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)
    after: Annotated[str, Field(pattern=CURSOR)] | Absent = Field(
        None, description="The `next` of the page before."
    )


class JobQuery(QueryModel):
    """The query of GET /v1/jobs/{id}."""

    prefix: Flag = False


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _between(begin_ms: int, end_ms: int | None) -> int | None:
    return None if end_ms is None else end_ms - begin_ms


class JobTimings(ResponseModel):
    """Milliseconds; null: not yet."""

    queue_ms: int | None
    ttft_ms: int | None
    total_ms: int | None


class JobError(ResponseModel):
    code: str | None
    message: str


class JobAttempt(ResponseModel):
    """What one worker did of a job.

    `outcome`: null while it runs; "ended" with the job's end; "died": the worker or its engine;
    "handed_over": given back, or taken up again, without a death. `cause`: of the end of one that
    did not end the job.
    """

    attempt: int
    worker: str
    started_at: float
    ended_at: float | None  # its last token, or the job's end; null while it runs, or without one
    completion_tokens: int  # that the job had when it started
    generated_tokens: int  # that it added
    outcome: Literal["ended", "died", "handed_over"] | None
    # worker_lost, released, preempted, engine_died, engine_stalled, device_lost, upstream_lost;
    # null: none, or not known
    cause: str | None

    @classmethod
    def all_of(cls, record: JobRecord) -> list[JobAttempt]:
        """Returns the latest attempts, oldest first."""
        claims = record.claims
        found = []
        for number, claim in enumerate(claims, start=1):
            is_last = number == len(claims)
            deaths_after = record.deaths if is_last else claims[number].deaths
            tokens_after = record.completion_tokens if is_last else claims[number].num_tokens
            last_ms, cause = claim.last_ms, claim.cause
            outcome: Literal["ended", "died", "handed_over"] | None = "handed_over"
            if deaths_after > claim.deaths:
                outcome = "died"
            elif is_last and record.is_worker_lost:
                outcome, last_ms, cause = "died", record.last_ms, ClaimEnd.WORKER_LOST
            elif is_last and record.state is not JobState.QUEUED:
                outcome = None if record.state is JobState.RUNNING else "ended"
                last_ms = record.ended_ms
            found.append(
                cls(
                    attempt=claim.attempt,
                    worker=claim.worker_id,
                    started_at=claim.claimed_ms / 1000,
                    ended_at=_seconds(last_ms),
                    completion_tokens=claim.num_tokens,
                    generated_tokens=max(0, tokens_after - claim.num_tokens),
                    outcome=outcome,
                    cause=cause,
                )
            )
        return found


class JobRecovery(ResponseModel):
    """A job whose worker is gone and that no other one has resumed yet."""

    tokens: int  # that it has, and keeps
    since: float  # its last token, or the start of the attempt that ended
    lost_worker: str
    cause: str  # as of an attempt

    @classmethod
    def of(cls, record: JobRecord) -> JobRecovery | None:
        """Returns None for a job that no worker has had, that has one, or that has ended."""
        is_released = record.state is JobState.QUEUED and record.attempt > 0
        if not record.claims or not (record.is_worker_lost or is_released):
            return None
        claim = record.claims[-1]
        last_ms = record.last_ms if claim.last_ms is None else claim.last_ms
        return cls(
            tokens=record.completion_tokens,
            since=(claim.claimed_ms if last_ms is None else last_ms) / 1000,
            lost_worker=claim.worker_id,
            cause=claim.cause
            or (ClaimEnd.WORKER_LOST if record.is_worker_lost else ClaimEnd.RELEASED),
        )


def estimated_wait_s(model: ServedModel) -> float | None:
    """Returns the seconds until a worker serves a model, about; None: one does, or not known."""
    return None if model.is_served or model.offer is None else round(model.offer.wait_s, 1)


class JobObject(ResponseModel):
    """A job; times are Unix seconds of the Redis clock, null: not yet."""

    id: str
    object: Literal["job"] = "job"
    job_id: str
    status: JobState
    model: str
    kind: str
    num_choices: int
    tenant: str
    queue_position: int | None
    queue_paused: bool  # it waits because an operator has paused its model's queue
    estimated_wait_s: float | None  # until a worker serves its model; null: one does, or not known
    worker: str | None
    # Why it got it: "prefix": by its prefix cache; "late": the worker with the prefix did not take
    # the job in time; "any": no preference.
    placed: str | None
    attempt: int
    preemptions: int  # times that it gave its slot to a job of a higher lane, and waited
    attempts: list[JobAttempt]  # the latest 16; none from an older release
    recovery: JobRecovery | None  # null: no worker was lost, or another one has resumed it
    durability: Durability
    created_at: float
    started_at: float | None
    first_token_at: float | None
    ended_at: float | None
    expires_at: float | None
    queue_expires_at: float | None
    retained_until: float | None  # when its record expires; null: before its end
    text_retained_until: float | None  # likewise its text
    timings: JobTimings
    usage: UsageObject
    finish_reason: str | None
    stop_reason: str | int | None
    error: JobError | None
    sampling: dict[str, int | float] | None  # what the job has; null: from an older release
    client_request_id: str | None
    prefix: JobPrefix | None  # null: not requested
    exact_resume: bool | None  # of its model's workers now; null: the model is not known any more

    @classmethod
    def of(cls, record: JobRecord, known: Mapping[str, ServedModel]) -> JobObject:
        """Returns a job as its record has it; `known` are the models by name."""
        model = known.get(record.model)
        has_failed = record.state in (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
        usage = Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
        return cls(
            id=public_id(record.kind, record.job_id),
            job_id=record.job_id,
            status=record.state,
            model=record.model,
            kind=record.kind,
            num_choices=record.num_choices,
            tenant=record.tenant,
            queue_position=record.queue_position,
            queue_paused=record.state is JobState.QUEUED and model is not None and model.is_paused,
            estimated_wait_s=(
                estimated_wait_s(model) if model and record.state is JobState.QUEUED else None
            ),
            worker=record.owner,
            placed=record.placed,
            attempt=record.attempt,
            preemptions=record.preemptions,
            attempts=JobAttempt.all_of(record),
            recovery=JobRecovery.of(record),
            durability=record.durability,
            created_at=record.submitted_ms / 1000,
            started_at=_seconds(record.started_ms),
            first_token_at=_seconds(record.first_token_ms),
            ended_at=_seconds(record.ended_ms),
            expires_at=_seconds(record.deadline_ms),
            queue_expires_at=_seconds(record.queue_deadline_ms),
            retained_until=_seconds(record.until_ms),
            text_retained_until=_seconds(record.text_until_ms),
            timings=JobTimings(
                queue_ms=_between(record.submitted_ms, record.started_ms),
                ttft_ms=_between(record.submitted_ms, record.first_token_ms),
                total_ms=_between(record.submitted_ms, record.ended_ms),
            ),
            usage=UsageObject.model_validate(usage_payload(usage)),
            finish_reason=record.reason if record.state is JobState.FINISHED else None,
            stop_reason=record.stop_reason,
            prefix=None,
            error=JobError(code=record.reason, message=record.message or "")
            if has_failed
            else None,
            sampling=None if record.sampling is None else dict(record.sampling),
            client_request_id=record.client_request_id,
            exact_resume=None if model is None else model.card.exact_resume,
        )


class ListedJobs(ResponseModel):
    """How far a search went: `searched` jobs were looked at. `next`: where the next page begins, as
    `after`; null: nothing follows."""

    searched: int
    has_more: bool
    next: str | None

    @classmethod
    def of(cls, page: JobPage) -> ListedJobs:
        """Returns how far the search of a page went."""
        return cls(
            searched=page.num_searched,
            has_more=page.after is not None,
            next=None if page.after is None else str(page.after),
        )


class JobList(ListedJobs):
    """A page of jobs. It may have fewer than the limit although others follow: a search is
    bounded."""

    object: Literal["list"] = "list"
    data: list[JobObject]


class JobEventsQuery(ListQuery):
    """The query of GET /v1/jobs/{id}/events."""

    limit: int = Field(100, ge=1, le=MAX_EVENTS)
    after: Annotated[str, Field(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")] | Absent = None


class LogEvent(ResponseModel):
    """An event of a job's log. Its `id` is the cursor after it: tokens and bytes so far.

    `text` has at most MAX_EVENT_CHARS; `is_cut`: it was longer.
    """

    id: str
    type: Literal["prompt", "delta", "end"]
    num_tokens: int
    text: str = ""
    is_cut: bool = False
    choices: list[int] = []  # that have a part in it
    status: JobState | None = None  # of the end
    reason: str | None = None  # likewise: of a finish, or an error's code

    @classmethod
    def of(cls, event: Delta | JobEvent) -> LogEvent:
        """Returns an event as the log has it. `event` is one that a log can have."""
        if isinstance(event, Delta):
            segments = event.segments or ()
            return cls(
                id=str(event.end),
                type="delta",
                num_tokens=len(event.token_ids),
                text=event.text[:MAX_EVENT_CHARS],
                is_cut=len(event.text) > MAX_EVENT_CHARS,
                choices=sorted({segment.choice for segment in segments}) or [0],
            )
        if isinstance(event, PromptSlice):
            return cls(id=f"0-{event.index + 1}", type="prompt", num_tokens=0)
        assert isinstance(event, Finished | Failed), "a start is not in the log"
        end = cls(id=f"{event.end.num_tokens + 1}-0", type="end", num_tokens=0)
        if isinstance(event, Finished):
            return end.model_copy(update={"status": JobState.FINISHED, "reason": event.reason})
        failure = {"status": event.state, "reason": event.code, "text": event.message}
        return end.model_copy(update=failure)


class LogPage(ResponseModel):
    """A page of a job's log. `has_expired`: the requested part was lost before its time."""

    object: Literal["list"] = "list"
    data: list[LogEvent]
    has_more: bool
    has_expired: bool


class StreamToken(ResponseModel):
    """Opens one job's stream; `expires_at` is Unix seconds."""

    object: Literal["stream_token"] = "stream_token"
    token: str
    url: str
    expires_at: int


class DeadLetterObject(ResponseModel):
    """A job that killed whatever ran it; `died_at` is Unix seconds of the Redis clock."""

    id: str
    object: Literal["dead_letter"] = "dead_letter"
    job_id: str
    model: str
    kind: str
    tenant: str
    code: str
    crashes: int
    completion_tokens: int
    died_at: float

    @classmethod
    def of(cls, dead_letter: DeadLetter) -> DeadLetterObject:
        """Returns a dead letter as the store has it."""
        return cls(
            id=public_id(dead_letter.kind, dead_letter.job_id),
            job_id=dead_letter.job_id,
            model=dead_letter.model,
            kind=dead_letter.kind,
            tenant=dead_letter.tenant,
            code=dead_letter.reason,
            crashes=dead_letter.crashes,
            completion_tokens=dead_letter.num_tokens,
            died_at=dead_letter.died_ms / 1000,
        )


class DeadLetterList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[DeadLetterObject]


class DeadLetterDeleted(ResponseModel):
    id: str
    object: Literal["dead_letter"] = "dead_letter"
    deleted: Literal[True] = True
