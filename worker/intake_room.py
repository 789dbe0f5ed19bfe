"""IntakeRoom: how many more choices this worker should take from the queue now.

A place in the batch is not enough: a job whose prompt finds no KV blocks would wait here, while
another worker may have them. So one such job at most is taken, which keeps the engine fed. And what
waits here for its first token could wait for another worker's step: a burst goes to all workers, a
few steps' prompts at a time, not to the one that asked first.

Nor is a place always needed: the engine takes seats from tenants and jobs that hold many and gives
them to those that hold few (worker/engine/seats.py), which it can do for jobs that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import MAX_CHOICES
from shared.transport.base import Delivery
from worker.engine.seats import MIN_GAP
from worker.engine_messages import EngineReady
from worker.running_jobs import RunningJob, RunningJobs

MEMORY = 16  # prompts over which the usual length of one is averaged
MAX_NOT_BEGUN = 32  # choices that wait here for their first token, while places are free
OVERSUBSCRIBED = 8  # places for each job that may be taken without one


def max_waiting(max_num_seqs: int) -> int:
    """Returns how many sequences may wait in an engine: bounded by what is taken for it."""
    jobs_taken_at_once = max_num_seqs // OVERSUBSCRIBED + 1
    return 2 * max_num_seqs + (jobs_taken_at_once + 1) * MAX_CHOICES


@dataclass(frozen=True, slots=True)
class Oversubscription:
    """Jobs to take although all places are taken; none of these tenants, which get no seat."""

    count: int
    leave_out: tuple[str, ...]


class EngineFigures(Protocol):
    """The engine's last word, which may be a twentieth of a second old."""

    @property
    def stats(self) -> Mapping[str, int]: ...
    @property
    def ready(self) -> EngineReady | None: ...


class IntakeRoom:
    """Called before each pull; `took` is told what came of it.

    Blocks are known for what has begun. What has not (it waits, or its prefill is under way) is
    counted by the tokens that it needs, so that during a long prefill a worker rather holds back
    than takes too much. What comes next is not known: it is taken to be as long as the last prompts
    were.
    """

    def __init__(self, jobs: RunningJobs, engine: EngineFigures) -> None:
        self._jobs = jobs
        self._engine = engine
        self._usual_tokens = 0.0  # not known yet

    def __call__(self) -> int:
        """Choices; 0 is also the answer while a job that does not fit waits in the engine."""
        places = self._jobs.room
        ready = self._engine.ready
        if places == 0 or ready is None:
            return places
        if self._usual_tokens == 0.0:
            return 1  # it will tell
        waiting = self._not_begun()
        places = min(places, MAX_NOT_BEGUN - sum(map(_num_in_engine, waiting)))
        if places <= 0:
            return 0
        not_begun = sum(map(_tokens, waiting))
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.block_size - not_begun
        usual = max(self._usual_tokens, ready.block_size)
        fitting = int(free_tokens // usual)
        if fitting < 1:
            return 0 if not_begun else 1
        return min(places, fitting)

    def oversubscription(self) -> Oversubscription | None:
        """Returns what to take while there is no room; None: nothing would get a seat. Else one
        tenant's jobs, waiting or long, would keep all others out."""
        ready, num_places = self._engine.ready, self._jobs.max_num_seqs
        if ready is None or self():
            return None
        if len(self._jobs) >= 2 * num_places:
            return None
        if self._jobs.num_in_engine >= 2 * num_places + MAX_CHOICES:
            return None
        waiting = self._not_begun()
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.block_size
        free_tokens -= sum(map(_tokens, waiting))
        fits = free_tokens >= max(self._usual_tokens, ready.block_size)
        seats, widest = Counter[str](), Counter[str]()
        for job in self._jobs:
            held = _num_in_engine(job)
            tenant = job.job.tenant
            seats[tenant] += held
            widest[tenant] = max(widest[tenant], held)
        most = max(seats.values(), default=0)
        if most < MIN_GAP:
            return None
        leave_out = [t for t in seats if most - seats[t] < MIN_GAP and widest[t] < MIN_GAP]
        # Jobs of these that were taken with others behind them wait for a seat, not for a step.
        num_soon = sum(job.job.tenant not in leave_out for job in waiting)
        count = (max(1, num_places // OVERSUBSCRIBED) if fits else 1) - num_soon
        return Oversubscription(count, tuple(leave_out)) if count > 0 else None

    def _not_begun(self) -> list[RunningJob]:
        return [job for job in self._jobs if job.in_engine and job.first_token_s is None]

    def took(self, deliveries: Sequence[Delivery]) -> None:
        """Remembers how long prompts are."""
        for delivery in deliveries:
            length = len(delivery.job.prompt_token_ids)
            if self._usual_tokens == 0.0:
                self._usual_tokens = length
            self._usual_tokens += (length - self._usual_tokens) / MEMORY


def _num_in_engine(job: RunningJob) -> int:
    return sum(choice.has_place for choice in job.choices)


def _tokens(job: RunningJob) -> int:
    """What its first step needs: the prompt once, and what each choice has said before."""
    return len(job.job.prompt_token_ids) + job.num_resumed
