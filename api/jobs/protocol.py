"""A job as HTTP shows it."""

from __future__ import annotations

from typing import Any, Literal

from api.generation.formatter import usage_payload
from api.generation.protocol import ResponseModel, UsageObject
from api.ids import public_id
from shared.messages import InvalidParameter, JobState, Usage
from shared.transport.ports.jobs import JobRecord

_EARLIER = {"completed": JobState.FINISHED}  # what earlier releases called a state


def parse_status(word: str) -> JobState:
    """Raises InvalidParameter("state", ...). A state's word is the same here as in the store."""
    if word in _EARLIER:
        return _EARLIER[word]
    if word not in set(JobState):
        raise InvalidParameter("state", f"must be one of {', '.join(JobState)}")
    return JobState(word)


def job_payload(record: JobRecord) -> dict[str, Any]:
    """Times are Unix seconds of the Redis clock, durations milliseconds; null: not yet."""
    finished = record.state is JobState.FINISHED
    failed = record.state in (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
    usage = Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
    return {
        "id": public_id(record.kind, record.job_id),
        "object": "job",
        "job_id": record.job_id,
        "status": record.state.value,
        "model": record.model,
        "kind": record.kind,
        "num_choices": record.num_choices,
        "tenant": record.tenant,
        "queue_position": record.queue_position,
        "worker": record.owner,
        "attempt": record.attempt,
        "durability": record.durability.value,
        "created_at": _seconds(record.submitted_ms),
        "started_at": _seconds(record.started_ms),
        "first_token_at": _seconds(record.first_token_ms),
        "ended_at": _seconds(record.ended_ms),
        "expires_at": _seconds(record.deadline_ms),
        "queue_expires_at": _seconds(record.queue_deadline_ms),
        "timings": {
            "queue_ms": _between(record.submitted_ms, record.started_ms),
            "ttft_ms": _between(record.submitted_ms, record.first_token_ms),
            "total_ms": _between(record.submitted_ms, record.ended_ms),
        },
        "usage": usage_payload(usage),
        "finish_reason": record.reason if finished else None,
        "stop_reason": record.stop_reason,
        "error": {"code": record.reason, "message": record.message or ""} if failed else None,
        "sampling": record.sampling,
        "client_request_id": record.client_request_id,
    }


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _between(begin_ms: int, end_ms: int | None) -> int | None:
    return None if end_ms is None else end_ms - begin_ms


# The responses of the routes of jobs.


class JobTimings(ResponseModel):
    """Milliseconds; null: not yet."""

    queue_ms: int | None
    ttft_ms: int | None
    total_ms: int | None


class JobError(ResponseModel):
    code: str | None
    message: str


class JobAnswer(ResponseModel):
    """A job; times are Unix seconds of the Redis clock, null: not yet."""

    id: str
    object: Literal["job"]
    job_id: str
    status: JobState
    model: str
    kind: str
    num_choices: int
    tenant: str
    queue_position: int | None
    worker: str | None
    attempt: int
    created_at: float
    started_at: float | None
    first_token_at: float | None
    ended_at: float | None
    expires_at: float | None
    queue_expires_at: float | None
    timings: JobTimings
    usage: UsageObject
    finish_reason: str | None
    stop_reason: str | int | None
    error: JobError | None
    sampling: dict[str, float] | None  # what the job has; null: of an older release
    client_request_id: str | None


class JobList(ResponseModel):
    object: Literal["list"]
    data: list[JobAnswer]


class StreamToken(ResponseModel):
    """Opens one job's stream; `expires_at` is Unix seconds."""

    object: Literal["stream_token"]
    token: str
    url: str
    expires_at: int


class DeadLetterAnswer(ResponseModel):
    """A job that killed whatever ran it; `died_at` is Unix seconds of the Redis clock."""

    id: str
    object: Literal["dead_letter"]
    job_id: str
    model: str
    kind: str
    tenant: str
    code: str
    crashes: int
    completion_tokens: int
    died_at: float


class DeadLetterList(ResponseModel):
    object: Literal["list"]
    data: list[DeadLetterAnswer]


class DeadLetterDeleted(ResponseModel):
    id: str
    object: Literal["dead_letter"]
    deleted: Literal[True]
