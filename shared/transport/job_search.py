"""JobSearch over Redis: the indexes of jobs by state, tenant and model, merged and filtered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from shared.keys import Keys, is_id_part, is_job_id
from shared.messages import TERMINAL_STATES, JobState
from shared.redis.connections import Connections
from shared.transport.failures import translated
from shared.transport.job_records import LIVE_STATES, Fields, JobRecords
from shared.transport.ports.job_search import (
    MAX_LISTED,
    MAX_SEARCHED,
    JobCursor,
    JobFilter,
    JobPage,
)
from shared.transport.ports.jobs import JobRecord
from shared.transport.scripts import Scripts

PAGE = 200  # entries of an index, and hashes, in one read
_WHOLE_ID = re.compile(r"\d{1,2}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # of frontends

Entry = tuple[int, str]  # score and id: newest first is the order of falling entries


class RedisJobSearch:
    """Implements JobSearch."""

    def __init__(self, keys: Keys, connections: Connections, scripts: Scripts) -> None:
        self._keys = keys
        self._redis = connections.commands
        self._records = JobRecords(connections, scripts)

    async def find(
        self,
        wanted: JobFilter,
        limit: int,
        after: JobCursor | None = None,
        max_searched: int = MAX_SEARCHED,
    ) -> JobPage:
        limit = max(0, min(limit, MAX_LISTED))
        part = wanted.id_part
        if limit == 0 or (part is not None and not is_id_part(part)):
            return JobPage([], None, 0)
        if part is not None and _WHOLE_ID.fullmatch(part) and is_job_id(part):
            return JobPage(
                await self._matching(
                    [part], wanted, LIVE_STATES if wanted.is_live else tuple(JobState)
                ),
                None,
                1,
            )
        found: dict[str, tuple[JobCursor, JobRecord]] = {}
        num_searched = 0
        for is_live, states, indexes in self._stages(wanted):
            if after is not None and is_live and not after.is_live:
                continue
            bound = None if after is None or after.is_live != is_live else after[1:]
            has_more, usual = True, max(1, limit + 1 - len(found))
            while has_more:
                if num_searched >= max_searched and bound is not None:
                    return _page(found, limit, JobCursor(is_live, *bound), num_searched)
                count = min(usual, PAGE, max(1, max_searched - num_searched))
                usual = PAGE  # some are not wanted, or have gone: look further
                entries, has_more = await self._entries(indexes, bound, count)
                num_searched += len(entries)
                if not entries:
                    break
                bound = entries[-1]
                scores = {job_id: score for score, job_id in entries}
                for record in await self._matching(list(scores), wanted, states):
                    cursor = JobCursor(is_live, scores[record.job_id], record.job_id)
                    found.setdefault(record.job_id, (cursor, record))
                if len(found) > limit:
                    return _page(found, limit, None, num_searched)
        return _page(found, limit, None, num_searched)

    def _stages(
        self, wanted: JobFilter
    ) -> Iterator[tuple[bool, Sequence[JobState], Sequence[str]]]:
        """Yields live jobs, then ended ones: whether they live, their states, and the indexes that
        list them."""
        keys, state, tenant = self._keys, wanted.state, wanted.tenant
        live = [one for one in LIVE_STATES if state in (None, one)]
        if live:
            by_model = state is JobState.QUEUED and tenant is None and wanted.model is not None
            yield (
                True,
                live,
                [keys.queued_for(wanted.model or "")]
                if by_model
                else [keys.listed(one, tenant) for one in live],
            )
        ended = [one for one in sorted(TERMINAL_STATES) if state in (None, one)]
        if ended and not wanted.is_live:
            indexes = [keys.ended(one) for one in ended] if tenant is None else []
            yield False, ended, indexes or [keys.ended_of(tenant or "")]

    async def _entries(
        self, indexes: Sequence[str], bound: Entry | None, count: int
    ) -> tuple[list[Entry], bool]:
        """Returns entries below `bound`, newest first, and whether others follow."""
        newest = "+inf" if bound is None else bound[0]
        while True:
            with translated("list_jobs"):
                # MULTI: a job that is claimed between two looks would be in neither index.
                pipe = self._redis.pipeline(transaction=True)
                for index in indexes:
                    pipe.zrevrangebyscore(index, newest, "-inf", 0, count, withscores=True)
                listed: list[Any] = await pipe.execute()
            pages = [[(int(score), job_id.decode()) for job_id, score in page] for page in listed]
            # Below the last entry of a page that was cut, another index's would come too early.
            cut = [page[-1] for page in pages if len(page) == count]
            least = max(cut, default=(-1, ""))
            entries = {entry for page in pages for entry in page if entry >= least}
            below = sorted((e for e in entries if bound is None or e < bound), reverse=True)
            if below or not cut:
                return below[:count], bool(cut) or len(below) > count
            count *= 2  # all of them were read before: many have the score of `bound`

    async def _matching(
        self, job_ids: Sequence[str], wanted: JobFilter, states: Sequence[JobState]
    ) -> list[JobRecord]:
        """Returns the records of those that are wanted and in one of `states`: an index may be out
        of date."""
        if (part := wanted.id_part) is not None:
            job_ids = [one for one in job_ids if one.startswith(part) or one.endswith(part)]
        if not job_ids:
            return []
        given = {
            b"tenant": wanted.tenant,
            b"model": wanted.model,
            b"reason": wanted.reason,
            b"state": wanted.state,
        }
        fields = {name: value.encode() for name, value in given.items() if value is not None}
        names = {state.encode() for state in states}

        def is_wanted(job: Fields) -> bool:
            has_fields = all(job.get(name) == value for name, value in fields.items())
            return has_fields and job.get(b"state") in names

        with translated("list_jobs"):
            pipe = self._redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hgetall(self._keys.job(job_id))
            hashes = await pipe.execute()
            rows = [row for row in zip(job_ids, hashes, strict=True) if is_wanted(row[1])]
            return await self._records.of(rows)


def _page(
    found: dict[str, tuple[JobCursor, JobRecord]],
    limit: int,
    after: JobCursor | None,
    num_searched: int,
) -> JobPage:
    """Returns a page. `after`: where the search stopped; None: at its end, or at more than `limit`
    jobs."""
    rows = list(found.values())
    if len(rows) > limit:
        after = rows[limit - 1][0]
    return JobPage([record for _, record in rows[:limit]], after, num_searched)
