"""Records of jobs: one job's hash read back, and lists from the indexes by state and tenant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.keys import Keys
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
from shared.transport.failures import translated
from shared.transport.ports.jobs import JobClaim, JobRecord, TransportError
from shared.transport.scripts import Scripts
from shared.transport.wire import build_end, decode_stop_reason

MAX_LISTED = 1000  # records of one list_jobs
LIST_PAGE = 200
MAX_SCANNED = 10_000  # entries of an index looked at by one list_jobs
POSITION_MAX = 1000  # entries counted per lane
LIVE_STATES = (JobState.QUEUED, JobState.RUNNING)
# All fields that this release writes; other fields of a hash are shown as `extra`.
_JOB_FIELDS = frozenset(
    b"v state model tenant kind attempt owner crashes deaths stalls losses n b h "
    b"prompt_tokens cached_tokens q qid sub_ms claim_ms start_ms first_ms out_ms last_ms free_ms "
    b"end_ms deadline_ms queue_deadline_ms orphan_ms reason stop_reason message by fe og crid "
    b"retain_ms choices lane work reserved idem durability sampling ps claims "
    b"held held_log lp_bytes kept_until_ms log_kept_until_ms brief "
    b"record_ms text_ms own_text until_ms text_until_ms text_why".split()
)

Fields = Mapping[bytes, bytes]


class JobListing:
    """The listing half of RedisJobStore."""

    def __init__(self, keys: Keys, connections: Connections, scripts: Scripts) -> None:
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts

    async def list_jobs(
        self, state: JobState | None, limit: int, tenant: str | None = None
    ) -> Sequence[JobRecord]:
        """Returns the records newest first; see JobStore."""
        limit = max(0, min(limit, MAX_LISTED))
        found: list[JobRecord] = []
        if state not in TERMINAL_STATES:
            states = LIVE_STATES if state is None else (state,)
            found = await self._list_live(states, tenant, limit)
        if len(found) < limit and (state is None or state in TERMINAL_STATES):
            wanted = sorted(TERMINAL_STATES) if state is None else [state]
            if tenant is None:
                ended = [
                    record
                    for one in wanted
                    for record in await self._list_index(self._keys.ended(one), [one], None, limit)
                ]
                ended.sort(key=lambda record: record.ended_ms or 0, reverse=True)
            else:
                index = self._keys.ended_of(tenant)
                ended = await self._list_index(index, wanted, tenant, limit)
            live = {record.job_id for record in found}  # one may have ended between two looks
            found += [record for record in ended if record.job_id not in live]
        return found[:limit]

    async def _list_live(
        self, states: Sequence[JobState], tenant: str | None, limit: int
    ) -> list[JobRecord]:
        """Merges the indexes of these states; entries that are out of date are left out."""
        indexes = [self._keys.listed(state, tenant) for state in states]
        count = limit
        while True:
            with translated("list_jobs"):
                # MULTI: a job that is claimed between two looks would be in neither index.
                pipe = self._redis.pipeline(transaction=True)
                for index in indexes:
                    pipe.zrevrange(index, 0, count - 1, withscores=True)
                listed = await pipe.execute() if count else []
            newest = sorted(
                {entry for entries in listed for entry in entries},
                key=lambda entry: (entry[1], entry[0]),
                reverse=True,
            )
            found: list[JobRecord] = []
            for at in range(0, len(newest), LIST_PAGE):
                page = [job_id for job_id, _ in newest[at : at + LIST_PAGE]]
                found += await self._hashes(page, states, tenant)
                if len(found) >= limit:
                    return found[:limit]
            is_whole = all(len(entries) < count for entries in listed)
            if is_whole or count >= MAX_SCANNED:
                return found
            count = min(2 * count, MAX_SCANNED)  # some were out of date: look further

    async def _list_index(
        self, index: str, states: Sequence[JobState], tenant: str | None, limit: int
    ) -> list[JobRecord]:
        """Returns the newest of an index that are in one of the states."""
        found: list[JobRecord] = []
        at, page = 0, min(limit, LIST_PAGE)
        while at < MAX_SCANNED and len(found) < limit:
            with translated("list_jobs"):
                ids: Any = await self._redis.zrevrange(index, at, at + page - 1)
            found += (await self._hashes(ids, states, tenant))[: limit - len(found)]
            if len(ids) < page:
                break
            at += page
            page = min(2 * page, LIST_PAGE)  # some have gone, or are in another state: look further
        return found

    async def _hashes(
        self, ids: Sequence[bytes], states: Sequence[JobState], tenant: str | None
    ) -> list[JobRecord]:
        """Returns the records of the jobs that are in one of the states and the tenant's."""
        if not ids:
            return []
        wanted = {state.encode() for state in states}
        with translated("list_jobs"):
            pipe = self._redis.pipeline(transaction=False)
            for job_id in ids:
                pipe.hgetall(self._keys.job(job_id.decode()))
            rows = [
                (job_id.decode(), fields)
                for job_id, fields in zip(ids, await pipe.execute(), strict=True)
                if fields.get(b"state") in wanted
                and (tenant is None or fields.get(b"tenant") == tenant.encode())
            ]
            return await self.records(rows)

    async def records(self, rows: Sequence[tuple[str, Fields]]) -> list[JobRecord]:
        """Returns the records of these hashes, the queued ones' with their positions."""
        queued = [job_id for job_id, fields in rows if fields.get(b"state") == b"queued"]
        positions = dict(zip(queued, await self._positions(queued), strict=True))
        try:
            return [job_record(job_id, fields, positions.get(job_id)) for job_id, fields in rows]
        except ValueError as error:
            raise TransportError(str(error)) from error

    async def _positions(self, job_ids: Sequence[str]) -> list[int | None]:
        if not job_ids:
            return []
        places = await self._scripts.call(
            self._connections.scripts, "position", POSITION_MAX, *job_ids
        )
        return [place if place >= 0 else None for place in places]


def job_record(job_id: str, fields: Fields, queue_position: int | None = None) -> JobRecord:
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
            until_ms=_whole(fields, b"until_ms"),
            text_until_ms=_whole(fields, b"text_until_ms") or _whole(fields, b"until_ms"),
            deaths=int(fields.get(b"deaths", 0)),
            claims=decode_claims(fields.get(b"claims", b"")),
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


def decode_claims(text: bytes) -> tuple[JobClaim, ...]:
    """Decodes the lines that `with_claim` wrote. Raises ValueError for malformed ones."""
    found = []
    for line in text.decode().split("\n") if text else ():
        attempt, claimed_ms, num_tokens, deaths, worker_id = line.split("|", 4)
        found.append(
            JobClaim(int(attempt), int(claimed_ms), int(num_tokens), int(deaths), worker_id)
        )
    return tuple(found)


def _text(fields: Fields, name: bytes) -> str | None:
    value = fields.get(name, b"")
    return value.decode() if value else None


def _whole(fields: Fields, name: bytes) -> int | None:
    value = fields.get(name)
    return int(value) if value else None
