"""Records of jobs: their hashes read back, with the places of those that wait."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shared.messages import (
    TERMINAL_STATES,
    Cursor,
    Durability,
    Failed,
    Finished,
    JobState,
    OnDisconnect,
)
from shared.redis.connections import Connections
from shared.transport.ports.jobs import JobClaim, JobRecord, TransportError
from shared.transport.scripts import Scripts
from shared.transport.wire import build_end, decode_stop_reason

POSITION_MAX = 1000  # entries counted per lane
# In place of a position; see position.lua.
NOT_QUEUED, WORKER_LOST = -1, -2
LIVE_STATES = (JobState.QUEUED, JobState.RUNNING)
# All fields that this release writes; other fields of a hash are shown as `extra`.
_JOB_FIELDS = frozenset(
    b"v state model tenant kind attempt owner crashes deaths stalls losses n b h "
    b"prompt_tokens cached_tokens q qid sub_ms claim_ms start_ms first_ms out_ms last_ms free_ms "
    b"end_ms deadline_ms queue_deadline_ms orphan_ms reason stop_reason message by fe og crid "
    b"retain_ms choices lane work reserved idem durability sampling ps claims ends preemptions "
    b"held held_log lp_bytes kept_until_ms log_kept_until_ms brief "
    b"record_ms text_ms own_text until_ms text_until_ms text_why placed".split()
)

Fields = Mapping[bytes, bytes]


class JobRecords:
    """Makes records of hashes."""

    def __init__(self, connections: Connections, scripts: Scripts) -> None:
        self._connections = connections
        self._scripts = scripts

    async def of(self, rows: Sequence[tuple[str, Fields]]) -> list[JobRecord]:
        """Returns the records of these hashes, the queued ones' with their positions."""
        states = [state.encode() for state in LIVE_STATES]
        live = [job_id for job_id, fields in rows if fields.get(b"state") in states]
        positions = dict(zip(live, await self._positions(live), strict=True))
        try:
            return [
                job_record(job_id, fields, positions.get(job_id, NOT_QUEUED))
                for job_id, fields in rows
            ]
        except ValueError as error:
            raise TransportError(str(error)) from error

    async def _positions(self, job_ids: Sequence[str]) -> Sequence[int]:
        if not job_ids:
            return []
        reply: Sequence[int] = await self._scripts.call(
            self._connections.scripts, "position", POSITION_MAX, *job_ids
        )
        return reply


def job_record(job_id: str, fields: Fields, position: int = NOT_QUEUED) -> JobRecord:
    """Takes `position` as the script gives it. Raises ValueError for a hash that is not a job's."""
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
            queue_position=position if position >= 0 else None,
            extra={
                name.decode(errors="replace"): value.decode(errors="replace")
                for name, value in fields.items()
                if name not in _JOB_FIELDS
            },
            on_disconnect=_policy(fields.get(b"og", b"0")),
            num_choices=int(fields.get(b"choices", 1)),
            durability=_durability(fields.get(b"durability", b"")),
            sampling=_sampling(fields.get(b"sampling", b"")),
            until_ms=_whole(fields, b"until_ms"),
            text_until_ms=_whole(fields, b"text_until_ms") or _whole(fields, b"until_ms"),
            deaths=int(fields.get(b"deaths", 0)),
            preemptions=int(fields.get(b"preemptions", 0)),
            claims=decode_claims(fields.get(b"claims", b""), fields.get(b"ends", b"")),
            last_ms=_whole(fields, b"last_ms"),
            is_worker_lost=position == WORKER_LOST,
            placed=_text(fields, b"placed"),
        )
    except KeyError as error:
        raise ValueError(f"the hash of job {job_id} lacks {error}") from error


def end_of(fields: Fields) -> Finished | Failed | None:
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


def _policy(grace_ms: bytes) -> OnDisconnect:
    """Decodes the grace that `submit` wrote: '0' none, '' unlimited, else milliseconds."""
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


def decode_claims(text: bytes, ends: bytes = b"") -> tuple[JobClaim, ...]:
    """Decodes the lines that `with_claim` and `note_claim_end` wrote. Raises ValueError for
    malformed ones."""
    ended = {}
    for line in ends.decode().split("\n") if ends else ():
        attempt, last_ms, cause = line.split("|", 2)
        ended[attempt] = (cause, int(last_ms) if last_ms else None)
    found = []
    for line in text.decode().split("\n") if text else ():
        attempt, claimed_ms, num_tokens, deaths, worker_id = line.split("|", 4)
        numbers = (int(attempt), int(claimed_ms), int(num_tokens), int(deaths))
        found.append(JobClaim(*numbers, worker_id, *ended.get(attempt, (None, None))))
    return tuple(found)


def _text(fields: Fields, name: bytes) -> str | None:
    value = fields.get(name, b"")
    return value.decode() if value else None


def _whole(fields: Fields, name: bytes) -> int | None:
    value = fields.get(name)
    return int(value) if value else None
