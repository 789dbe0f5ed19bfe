"""Hashes read back: a job's record, a worker's status, a partition's counters."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shared.messages import (
    TERMINAL_STATES,
    Cursor,
    Durability,
    Failed,
    Finished,
    JobState,
    OnDisconnect,
)
from shared.transport.ports.jobs import JobRecord
from shared.transport.ports.registry import QueueStats, WorkerStatus
from shared.transport.wire import build_end, decode_stop_reason

Hash = Mapping[bytes, bytes]

# Everything that this release writes; what else a hash holds is shown as `extra`.
_JOB_FIELDS = frozenset(
    b"v state model tenant kind attempt owner crashes deaths losses n b h prompt_tokens "
    b"cached_tokens q qid sub_ms claim_ms start_ms first_ms end_ms deadline_ms queue_deadline_ms "
    b"orphan_ms reason stop_reason message by fe og crid retain_ms choices lane work reserved "
    b"idem durability sampling ps".split()
)
# Fields of a worker's hash that are not its statistics.
WORKER_FIELDS = frozenset(
    {"beat_ms", "lease_ms", "pull_ms", "taken", "models", "draining", "stalled"}
)


def job_record(job_id: str, fields: Hash, queue_position: int | None = None) -> JobRecord:
    """Raises ValueError for a hash that is not a job's."""
    try:
        return JobRecord(
            job_id=job_id,
            model=_text(fields, b"model") or "",
            state=JobState(fields[b"state"].decode()),
            kind=_text(fields, b"kind") or "",
            tenant=_text(fields, b"tenant") or "",
            attempt=int(fields[b"attempt"]),
            owner=_text(fields, b"owner"),
            reason=_text(fields, b"reason"),
            message=_text(fields, b"message"),
            stop_reason=decode_stop_reason(fields.get(b"stop_reason", b"")),
            client_request_id=_text(fields, b"crid"),
            prompt_tokens=int(fields.get(b"prompt_tokens", 0)),
            completion_tokens=int(fields.get(b"n", 0)),
            cached_tokens=int(fields.get(b"cached_tokens", 0)),
            submitted_ms=int(fields[b"sub_ms"]),
            started_ms=_whole(fields, b"start_ms"),
            first_token_ms=_whole(fields, b"first_ms"),
            ended_ms=_whole(fields, b"end_ms"),
            deadline_ms=int(fields[b"deadline_ms"]),
            queue_deadline_ms=_whole(fields, b"queue_deadline_ms"),
            queue_position=queue_position,
            extra={
                name.decode(errors="replace"): value.decode(errors="replace")
                for name, value in fields.items()
                if name not in _JOB_FIELDS
            },
            on_disconnect=_policy(fields.get(b"og", b"0")),
            num_choices=int(fields.get(b"choices", 1)),
            durability=_durability(fields.get(b"durability", b"")),
            sampling=_sampling(fields.get(b"sampling", b"")),
        )
    except KeyError as error:
        raise ValueError(f"the hash of job {job_id} lacks {error}") from error


def end_of(fields: Hash) -> Finished | Failed | None:
    """Returns the terminal event of a job's hash; None while the job lives or without a hash."""
    state = fields.get(b"state")
    if state is None or JobState(state.decode()) not in TERMINAL_STATES:
        return None
    return build_end(
        state=state.decode(),
        reason=_text(fields, b"reason") or "",
        end=Cursor(int(fields.get(b"n", 0)), int(fields.get(b"b", 0))),
        prompt_tokens=int(fields.get(b"prompt_tokens", 0)),
        cached_tokens=int(fields.get(b"cached_tokens", 0)),
        stop_reason=decode_stop_reason(fields.get(b"stop_reason", b"")),
        message=_text(fields, b"message") or "",
    )


def worker_status(worker_id: str, fields: Hash, now_ms: int) -> WorkerStatus:
    stats: dict[str, float | str] = {}
    for raw_name, raw_value in fields.items():
        name, value = raw_name.decode(errors="replace"), raw_value.decode(errors="replace")
        if name not in WORKER_FIELDS:
            stats[name] = _number_or_text(value)
    return WorkerStatus(
        worker_id=worker_id,
        models=tuple(json.loads(fields.get(b"models", b"[]"))),
        beat_age_s=max(0.0, (now_ms - int(fields.get(b"beat_ms", 0))) / 1000),
        draining=fields.get(b"draining") == b"1",
        stalled=fields.get(b"stalled") == b"1",
        stats=stats,
    )


def queue_stats(fields: Hash, queued_by_model: Mapping[str, int]) -> QueueStats:
    totals = {
        name.removesuffix(b"_total").decode(): int(value)
        for name, value in fields.items()
        if name.endswith(b"_total")
    }
    return QueueStats(
        queued=int(fields.get(b"queued", 0)),
        running=int(fields.get(b"running", 0)),
        queued_tokens=int(fields.get(b"queued_tokens", 0)),
        totals=totals,
        queued_by_model=queued_by_model,
    )


def _policy(grace_ms: bytes) -> OnDisconnect:
    """Decodes the grace that `submit` wrote: '0' none, '' for ever, else milliseconds."""
    if not grace_ms:
        return OnDisconnect.CONTINUE
    return OnDisconnect.CANCEL if grace_ms == b"0" else OnDisconnect.GRACE


def _durability(word: bytes) -> Durability:
    """Returns NONE for a durability of a newer release."""
    try:
        return Durability(word.decode())
    except ValueError:
        return Durability.NONE


def _sampling(text: bytes) -> dict[str, float] | None:
    """Returns None for malformed text."""
    try:
        value = json.loads(text) if text else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text(fields: Hash, name: bytes) -> str | None:
    value = fields.get(name, b"")
    return value.decode() if value else None


def _whole(fields: Hash, name: bytes) -> int | None:
    value = fields.get(name)
    return int(value) if value else None


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
