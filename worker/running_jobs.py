"""RunningJobs: the worker's table of claimed jobs. One task owns it; everybody else only looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.messages import Job, Usage
from worker.output import OutputProcessor


@dataclass(slots=True)
class RunningJob:
    """One claim of a job, until its end is durable or it is no longer ours."""

    job: Job
    attempt: int
    processor: OutputProcessor | None  # None: it failed before it could run
    num_resumed: int  # output tokens of earlier attempts
    num_tokens: int  # output tokens of all attempts
    cached_tokens: int | None  # of the first attempt; None: the engine has not said it yet
    in_engine: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    end_reason: str = ""  # set when its end is on the way to the log
    end_detail: str = ""

    @property
    def request_id(self) -> str:
        """The engine's name of it: an older attempt's outputs are never taken for a newer one's."""
        return f"{self.job.job_id}/{self.attempt}"

    @property
    def usage(self) -> Usage:
        return Usage(len(self.job.prompt_token_ids), self.num_tokens, self.cached_tokens or 0)


class RunningJobs:
    """Job id -> RunningJob, with the counts that admission and the stall watch need."""

    def __init__(self, max_num_seqs: int) -> None:
        self._jobs: dict[str, RunningJob] = {}
        self._max_num_seqs = max_num_seqs
        self.num_in_engine = 0
        self.changed = asyncio.Event()  # something left; whoever waits clears it

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(list(self._jobs.values()))

    def get(self, job_id: str) -> RunningJob | None:
        return self._jobs.get(job_id)

    def by_request_id(self, request_id: str) -> RunningJob | None:
        """None when the engine speaks of an attempt that is not in the table any more."""
        running = self._jobs.get(request_id.rpartition("/")[0])
        return running if running is not None and running.request_id == request_id else None

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._jobs)

    @property
    def room(self) -> int:
        """Jobs that may be taken now: free places in the engine; finished ones that wait for the
        store take a place in the table, which holds twice as many."""
        in_engine = self._max_num_seqs - self.num_in_engine
        return max(0, min(in_engine, 2 * self._max_num_seqs - len(self._jobs)))

    def add(self, running: RunningJob) -> None:
        assert running.job.job_id not in self._jobs, "a job is claimed once at a time"
        self._jobs[running.job.job_id] = running

    def enter_engine(self, running: RunningJob) -> None:
        running.in_engine = True
        self.num_in_engine += 1

    def leave_engine(self, running: RunningJob) -> None:
        """Idempotent."""
        if running.in_engine:
            running.in_engine = False
            self.num_in_engine -= 1
            self.changed.set()

    def remove(self, running: RunningJob) -> None:
        self.leave_engine(running)
        del self._jobs[running.job.job_id]
        self.changed.set()
