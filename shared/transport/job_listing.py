"""Lists of jobs, read from the indexes by state and tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.keys import Keys
from shared.messages import TERMINAL_STATES, JobState
from shared.redis.connections import Connections
from shared.transport.failures import translated
from shared.transport.ports.jobs import JobRecord, TransportError
from shared.transport.records import job_record
from shared.transport.scripts import Scripts

MAX_LISTED = 1000  # records of one list_jobs
LIST_PAGE = 200
MAX_SCANNED = 10_000  # entries of an index looked at by one list_jobs
POSITION_MAX = 1000  # entries counted per lane
LIVE_STATES = (JobState.QUEUED, JobState.RUNNING)

Fields = dict[bytes, bytes]


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
        if state is None or state in TERMINAL_STATES:
            ended: list[JobRecord] = []
            for one in sorted(TERMINAL_STATES) if state is None else (state,):
                part: list[JobRecord] = []
                await self._list_index(self._keys.ended(one), one, tenant, limit, part)
                ended += part
            ended.sort(key=lambda record: record.ended_ms or 0, reverse=True)
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
        self,
        index: str,
        state: JobState,
        tenant: str | None,
        limit: int,
        found: list[JobRecord],
    ) -> None:
        for at in range(0, MAX_SCANNED, LIST_PAGE):
            if len(found) >= limit:
                return
            with translated("list_jobs"):
                ids: Any = await self._redis.zrevrange(index, at, at + LIST_PAGE - 1)
            found += (await self._hashes(ids, (state,), tenant))[: limit - len(found)]
            if len(ids) < LIST_PAGE:
                return

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
        return [_record(job_id, fields, positions.get(job_id)) for job_id, fields in rows]

    async def _positions(self, job_ids: Sequence[str]) -> list[int | None]:
        if not job_ids:
            return []
        places = await self._scripts.call(
            self._connections.scripts, "position", POSITION_MAX, *job_ids
        )
        return [place if place >= 0 else None for place in places]


def _record(job_id: str, fields: Fields, position: int | None) -> JobRecord:
    try:
        return job_record(job_id, fields, position)
    except ValueError as error:
        raise TransportError(str(error)) from error
