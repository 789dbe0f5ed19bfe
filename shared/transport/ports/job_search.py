"""JobSearch: jobs by what they have, newest first, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shared.keys import is_job_id
from shared.messages import JobState
from shared.transport.ports.jobs import JobRecord

MAX_LISTED = 1000  # records of one page
MAX_SEARCHED = 5000  # jobs looked at for one page


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are searched for; None: any."""

    state: JobState | None = None
    tenant: str | None = None
    model: str | None = None
    reason: str | None = None  # an ErrorCode or a FinishReason
    id_part: str | None = None  # the beginning or the end of the job's id
    is_live: bool = False  # none that has ended


class JobCursor(NamedTuple):
    """A place in the list: the jobs after it are older."""

    is_live: bool
    score: int  # milliseconds: the deadline of a live job, the end of another
    job_id: str

    def __str__(self) -> str:
        return f"{'live' if self.is_live else 'ended'}.{self.score}.{self.job_id}"

    @classmethod
    def parse(cls, text: str) -> JobCursor:
        """Raises ValueError for a text that `str` did not make."""
        stage, _, rest = text.partition(".")
        score, _, job_id = rest.partition(".")
        is_number = score.isascii() and score.isdigit() and len(score) <= 16
        if stage not in ("live", "ended") or not is_number or not is_job_id(job_id):
            raise ValueError("not a cursor of a list of jobs")
        return cls(stage == "live", int(score), job_id)


class JobPage(NamedTuple):
    """`after`: where the next page begins; None: nothing follows. `num_searched`: jobs that were
    looked at for this one."""

    records: Sequence[JobRecord]
    after: JobCursor | None
    num_searched: int


class JobSearch(Protocol):
    """Every call may raise TransportError."""

    async def find(
        self,
        wanted: JobFilter,
        limit: int,
        after: JobCursor | None = None,
        max_searched: int = MAX_SEARCHED,
    ) -> JobPage:
        """Returns up to `limit` jobs, at most MAX_LISTED: live ones first, by deadline, the queued
        with their positions; then ended ones (the last thousand of each state, or of the tenant) by
        their end.

        A page may have fewer, or none, with others to follow: `max_searched` jobs were looked at. A
        job that moves from one state to another between two pages may be in both, or in neither.
        """
        ...
