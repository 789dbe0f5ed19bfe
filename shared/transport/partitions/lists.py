"""Lists over partitions: jobs, dead letters, kept prompts; each partition's are merged by time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shared.messages import TERMINAL_STATES, Job
from shared.transport.partitions.partitions import Partitions
from shared.transport.ports.dead_letters import DeadLetter, Requeued
from shared.transport.ports.job_search import (
    MAX_LISTED,
    MAX_SEARCHED,
    JobCursor,
    JobFilter,
    JobPage,
)
from shared.transport.ports.jobs import JobRecord


class PartitionedJobSearch:
    """Implements JobSearch; jobs of a partition that is away are left out."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def find(
        self,
        wanted: JobFilter,
        limit: int,
        after: JobCursor | None = None,
        max_searched: int = MAX_SEARCHED,
    ) -> JobPage:
        limit = max(0, min(limit, MAX_LISTED))
        each_searched = -(-max_searched // len(self._partitions.all))
        found = await self._partitions.each(
            lambda one: one.transport.search.find(wanted, limit, after, each_searched)
        )
        records = itertools.chain.from_iterable(page.records for page in found.values())
        rows = sorted(((_cursor(record), record) for record in records), reverse=True)
        # Beyond the place where one partition's page ends, others' jobs would come too early.
        ends = [page.after for page in found.values() if page.after is not None]
        end = max(ends, default=None)
        if end is not None:
            rows = [row for row in rows if row[0] >= end]
        if len(rows) > limit:
            end = rows[limit - 1][0]
        num_searched = sum(page.num_searched for page in found.values())
        return JobPage([record for _, record in rows[:limit]], end, num_searched)


def _cursor(record: JobRecord) -> JobCursor:
    """Returns the place of a job in the list; a later one is lower in it."""
    is_live = record.state not in TERMINAL_STATES
    return JobCursor(
        is_live, record.deadline_ms if is_live else record.ended_ms or 0, record.job_id
    )


class PartitionedDeadLetters:
    """Implements DeadLetters; each partition has its own bounds."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def list(self, tenant: str | None, limit: int) -> Sequence[DeadLetter]:
        found = await self._partitions.each(
            lambda one: one.transport.dead_letters.list(tenant, limit)
        )
        merged = itertools.chain.from_iterable(found.values())
        return sorted(merged, key=lambda one: one.died_ms, reverse=True)[: max(0, limit)]

    async def get(self, job_id: str) -> DeadLetter | Requeued | None:
        return await self._partitions.of(job_id).transport.dead_letters.get(job_id)

    async def request(self, job_id: str) -> Job | None:
        return await self._partitions.of(job_id).transport.dead_letters.request(job_id)

    async def drop(self, job_id: str) -> bool:
        return await self._partitions.of(job_id).transport.dead_letters.drop(job_id)


class PartitionedKeptPrompts:
    """Implements KeptPrompts; each partition has its own bounds."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def list(
        self, limit: int, tenant: str | None = None, model: str | None = None
    ) -> Sequence[JobRecord]:
        found = await self._partitions.each(
            lambda one: one.transport.prompts.list(limit, tenant, model)
        )
        merged = itertools.chain.from_iterable(found.values())
        return sorted(merged, key=lambda one: one.ended_ms or 0, reverse=True)[:limit]

    async def tokens(self, job_id: str) -> bytes | None:
        return await self._partitions.of(job_id).transport.prompts.tokens(job_id)
