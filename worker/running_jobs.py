"""RunningJobs: the worker's table of claimed jobs. JobRunner changes it; others read it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.messages import FinishReason, Job, Usage
from shared.tracing import attempt_fields
from shared.transport.ports.queue import Delivery
from worker.outbox import Outbox
from worker.output import OutputProcessor


@dataclass(slots=True)
class RunningChoice:
    """One choice of a claimed job: a sequence of the engine."""

    index: int
    request_id: str  # the engine's name of it
    resumed_token_ids: tuple[int, ...]  # outputs of earlier attempts
    num_tokens: int  # output tokens of all attempts
    finish_reason: FinishReason | None  # once it has ended
    stop_reason: str | int | None = None
    processor: OutputProcessor | None = None  # None: it has ended before, or cannot run
    has_slot: bool = False  # it is in the engine, or waits to be sent there
    was_sent: bool = False  # the engine knows it
    num_lane_preemptions: int = 0  # for higher lanes, in all attempts
    gave_way_s: float | None = None  # since when it waits, preempted for one


@dataclass(slots=True)
class RunningJob:
    """One claim of a job, until its end is durable or another worker has it."""

    job: Job
    attempt: int
    choices: tuple[RunningChoice, ...]
    num_resumed: int  # output tokens of earlier attempts
    cached_tokens: int | None  # of the first attempt; None: not reported yet
    waited_s: float = 0.0  # in the queue, before its first claim
    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    finished_s: float | None = None  # when its end was known here
    end_reason: str = ""  # set when its end is on the way to the log
    end_detail: str = ""
    outbox: Outbox = field(init=False)  # set when the job is admitted

    @classmethod
    def of(cls, delivery: Delivery) -> RunningJob:
        """Returns the state of a job that was just claimed."""
        job, attempt = delivery.job, delivery.attempt
        return cls(
            job=job,
            attempt=attempt,
            choices=tuple(
                RunningChoice(
                    index=index,
                    request_id=request_id_of(job.job_id, attempt, index),
                    resumed_token_ids=choice.token_ids,
                    num_tokens=len(choice.token_ids),
                    finish_reason=choice.finish_reason,
                    num_lane_preemptions=delivery.num_lane_preemptions,
                )
                for index, choice in enumerate(delivery.choices)
            ),
            num_resumed=len(delivery.output_token_ids),
            cached_tokens=delivery.cached_tokens if delivery.output_token_ids else None,
            waited_s=delivery.waited_s,
        )

    @property
    def in_engine(self) -> bool:
        """True while a choice is in the engine, or waits to be sent there."""
        return any(choice.has_slot for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices and attempts."""
        return sum(choice.num_tokens for choice in self.choices)

    def waits_preempted(self, since_s: float) -> bool:
        """Returns whether all choices that have not ended were preempted for higher lanes before
        `since_s`, and wait."""
        live = [choice for choice in self.choices if choice.finish_reason is None]
        times = [choice.gave_way_s for choice in live]
        return bool(times) and all(at_s is not None and at_s < since_s for at_s in times)

    @property
    def num_lane_preemptions(self) -> int:
        """Preemptions for higher lanes in all attempts, of the choice that had the most."""
        return max(choice.num_lane_preemptions for choice in self.choices)

    @property
    def log_fields(self) -> dict[str, object]:
        """What its lines in the log have."""
        return attempt_fields(self.job.job_id, self.attempt, self.job.traceparent)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.job.prompt_token_ids), self.num_tokens, self.cached_tokens or 0)


def request_id_of(job_id: str, attempt: int, choice: int) -> str:
    """Returns the engine's name of a choice, which no two attempts share."""
    return f"{job_id}/{attempt}/{choice}"


class RunningJobs:
    """Job id -> RunningJob, with the counts that admission and the stall watch need."""

    def __init__(self, max_num_seqs: int) -> None:
        self._jobs: dict[str, RunningJob] = {}
        self._by_request_id: dict[str, tuple[RunningJob, RunningChoice]] = {}
        self.max_num_seqs = max_num_seqs
        self.num_in_engine = 0  # choices, including waiting ones
        self.num_preempted = Counter[int]()  # choices, for higher lanes, by their lane
        self.changed = asyncio.Event()  # a job left or started; the waiter clears it

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(list(self._jobs.values()))

    def get(self, job_id: str) -> RunningJob | None:
        return self._jobs.get(job_id)

    def by_request_id(self, request_id: str) -> tuple[RunningJob, RunningChoice] | None:
        """Returns None for an attempt that is not in the table any more."""
        return self._by_request_id.get(request_id)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._jobs)

    @property
    def free_slots(self) -> int:
        """Choices that may be taken now: free slots of the engine, bounded by the table.

        The table holds twice as many jobs: some have ended and wait for Redis.
        """
        in_engine = self.max_num_seqs - self.num_in_engine
        return max(0, min(in_engine, 2 * self.max_num_seqs - len(self._jobs)))

    def add(self, running: RunningJob) -> None:
        assert running.job.job_id not in self._jobs, "a job is claimed once at a time"
        self._jobs[running.job.job_id] = running
        for choice in running.choices:
            self._by_request_id[choice.request_id] = (running, choice)

    def enter_engine(self, choice: RunningChoice) -> None:
        choice.has_slot = True
        self.num_in_engine += 1

    def leave_engine(self, choice: RunningChoice) -> None:
        """Frees the choice's slot. Idempotent."""
        if choice.has_slot:
            choice.has_slot = False
            self.num_in_engine -= 1
            self.changed.set()

    def remove(self, running: RunningJob) -> None:
        for choice in running.choices:
            self.leave_engine(choice)
            del self._by_request_id[choice.request_id]
        del self._jobs[running.job.job_id]
        self.changed.set()
