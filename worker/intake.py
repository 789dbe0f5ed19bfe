"""Intake: takes jobs from the queue while the engine has room, recovered ones first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import MAX_CHOICES
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Delivery, JobQueue
from worker.engine.seats import MIN_GAP
from worker.engine_process.messages import EngineReady
from worker.running_jobs import RunningJob, RunningJobs

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
LOOK_S = 0.1  # blocks come free without a word

log = logging.getLogger(__name__)


class Intake:
    """The pull loop. Waiting work stays in the queue, where another worker can take it.

    Lost deliveries (a reply that never arrived) are looked for at the start, every
    `reconcile_interval_s`, and as soon as anybody calls `suspect`.
    """

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        jobs: RunningJobs,
        admit: Callable[[Sequence[Delivery]], Awaitable[None]],
        repair: Callable[[], Awaitable[None]],
        *,
        room: Callable[[], int],
        oversubscription: Callable[[], Oversubscription | None] = lambda: None,
        engine_up: asyncio.Event,
        engine_failing: Callable[[], bool],
        pull_block_ms: int,
        reconcile_interval_s: float,
    ) -> None:
        """`admit` returns when the deliveries are in the table; `repair` sets the store up again
        after trouble and may raise TransportError; `room` returns how many choices to take now,
        `oversubscription` what to take when that is 0.

        `engine_failing`: the device failed and has given no token since. Until it has, jobs are
        taken one at a time, and those that were there at several failures only when no other waits.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._jobs = jobs
        self._admit = admit
        self._repair = repair
        self._room = room
        self._oversubscription = oversubscription
        self._engine_up = engine_up
        self._engine_failing = engine_failing
        self._nothing_waits = False
        self._pull_block_ms = pull_block_ms
        self._reconcile_interval_s = reconcile_interval_s
        self._reconcile_at_s = 0.0
        self._broken = False

    def suspect(self) -> None:
        """A delivery may be lost: look for it before the next pull."""
        self._reconcile_at_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            await self._engine_up.wait()
            try:
                if self._broken:
                    await self._repair()
                    self._broken = False
                    log.info("the queue can be reached again")
                await self._round()
                failures = 0
            except TransportError as error:
                if not self._broken:
                    log.warning("the queue cannot be reached", extra={"error": str(error)})
                self._broken = True
                self.suspect()
                await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1

    async def _round(self) -> None:
        if time.monotonic() >= self._reconcile_at_s:
            # Before the call: whoever suspects something meanwhile is heard.
            self._reconcile_at_s = time.monotonic() + self._reconcile_interval_s
            lost = await self._queue.reconcile(self._worker_id, self._jobs.ids)
            if lost:
                log.info("lost deliveries found", extra={"num_jobs": len(lost)})
                await self._take(lost)
        room = self._places()
        if room == 0:
            if not self._engine_failing():
                await self._oversubscribe()
            await self._wait_for_room()
            return
        suspects = self._nothing_waits or not self._engine_failing()
        recovered = await self._queue.recover(self._worker_id, room, suspects=suspects)
        if recovered:
            log.info("jobs recovered", extra={"num_jobs": len(recovered)})
            await self._take(recovered)
            room = self._places()
        if room == 0:
            return
        pulled = await self._queue.pull(self._worker_id, room, self._pull_block_ms)
        self._nothing_waits = not (recovered or pulled)
        if pulled:
            await self._take(pulled)

    async def _oversubscribe(self) -> None:
        """Takes jobs that the engine finds seats for, of those who hold few; recovered ones first.

        Else a worker whose places never come free would leave the jobs of a dead one to their
        deadlines.
        """
        more = self._oversubscription()
        if more is None:
            return
        taken = await self._queue.recover(self._worker_id, more.count)
        if not taken:
            taken = await self._queue.oversubscribe(self._worker_id, more.count, more.leave_out)
        if taken:
            await self._take(taken)

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        if self._engine_up.is_set():
            await self._admit(deliveries)
            return
        # The engine died while we asked. Its successor may take minutes to load: others go first.
        for delivery in deliveries:
            await self._queue.release(self._worker_id, delivery.job.job_id, delivery.attempt)

    def _places(self) -> int:
        """Choices to take now; while the device has to show that it works, one job at a time."""
        room = self._room()
        if self._engine_failing():
            return min(room, 0 if self._jobs.num_in_engine else 1)
        return room

    async def _wait_for_room(self) -> None:
        self._jobs.changed.clear()
        if self._places():
            return
        wait_s = max(0.0, self._reconcile_at_s - time.monotonic())
        if self._jobs.room or self._oversubscription() is not None:
            wait_s = min(wait_s, LOOK_S)
        try:
            await asyncio.wait_for(self._jobs.changed.wait(), wait_s)
        except TimeoutError:
            return


# IntakeRoom: how many more choices this worker should take from the queue now.
#
# A place in the batch is not enough: a job whose prompt finds no KV blocks would wait here, while
# another worker may have them. So one such job at most is taken, which keeps the engine fed. And
# what waits here for its first token could wait for another worker's step: a burst goes to all
# workers, a few steps' prompts at a time, not to the one that asked first.
#
# Nor is a place always needed: the engine takes seats from tenants and jobs that hold many and
# gives them to those that hold few (worker/engine/seats.py), which it can do for jobs that it has.

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
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.config.block_size - not_begun
        usual = max(self._usual_tokens, ready.config.block_size)
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
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.config.block_size
        free_tokens -= sum(map(_tokens, waiting))
        fits = free_tokens >= max(self._usual_tokens, ready.config.block_size)
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
