"""Intake: takes jobs from the queue while the engine has free slots, recovered ones first."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.backoff import Backoff
from shared.keys import NUM_LANES
from shared.messages import MAX_CHOICES
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait, first_of
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Delivery, JobQueue
from worker.engine.config import EngineConfig
from worker.engine.running_slots import MAX_LANE_PREEMPTIONS, MIN_GAP
from worker.engine_options import OVERSUBSCRIBED
from worker.running_jobs import RunningJob, RunningJobs
from worker.runtime.messages import EngineReady
from worker.standing_order import StandingOrder

POLL_INTERVAL_S = 0.1  # blocks come free without a message

log = logging.getLogger(__name__)


class EngineState(Protocol):
    """The engine as its supervisor knows it: the last report may be 50 ms old."""

    @property
    def up(self) -> asyncio.Event: ...
    @property
    def is_failing(self) -> bool: ...
    @property
    def stats(self) -> Mapping[str, int]: ...
    @property
    def ready(self) -> EngineReady | None: ...


class Intake:
    """The pull loop. Waiting jobs stay in the queue, where another worker can take them.

    Lost deliveries (whose reply never arrived) are recovered at the start, every
    `reconcile_interval_s`, and after a call of `suspect`.
    """

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        jobs: RunningJobs,
        engine: EngineState,
        estimator: AdmissionEstimator,
        order: StandingOrder,
        admit: Callable[[Delivery], None],
        repair: Callable[[], Awaitable[None]],
        *,
        pull_block_ms: int,
        reconcile_interval_s: float,
    ) -> None:
        """`admit` puts a delivery into the table; `repair` sets Redis up again after an outage
        and may raise TransportError.

        While the engine is failing, jobs are taken one at a time, and those that were running at
        several failures only when no other waits. While an operator has ordered a drain, none is
        taken but those that were delivered before it.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._jobs = jobs
        self._admit = admit
        self._repair = repair
        self._engine = engine
        self._estimator = estimator
        self._order = order
        self._nothing_waits = False
        self._pull_block_ms = pull_block_ms
        self._reconcile_interval_s = reconcile_interval_s
        self._reconcile_at_s = 0.0
        self._broken = False
        self._overtaking: asyncio.Task[None] | None = None
        self._outage = RateLimitedOutageLog(
            log,
            failing="the queue is unreachable",
            recovered="the queue is reachable again",
            of=STORE,
        )

    def suspect(self) -> None:
        """Looks for lost deliveries before the next pull."""
        self._reconcile_at_s = 0.0

    async def run(self) -> None:
        """Runs until cancelled; may run again."""
        try:
            await self._run()
        finally:
            overtaking, self._overtaking = self._overtaking, None
            if overtaking is not None:
                await cancel_and_wait(overtaking)

    async def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            await self._engine.up.wait()
            try:
                if self._broken:
                    await self._repair()
                    self._broken = False
                    self._outage.succeeded()
                await self._round()
                backoff.reset()
            except TransportError as error:
                self._outage.failed(error=str(error))
                self._broken = True
                self.suspect()
                await backoff.wait()

    async def _round(self) -> None:
        if self._overtaking is not None and self._overtaking.done():
            overtaking, self._overtaking = self._overtaking, None
            overtaking.result()
        # A delivery on its way to `_overtaking` would look lost.
        if self._is_reconcile_due() and self._overtaking is None:
            # Before the call, so that a `suspect` during it counts.
            self._reconcile_at_s = time.monotonic() + self._reconcile_interval_s
            lost = await self._queue.reconcile(self._worker_id, self._jobs.ids)
            if lost:
                log.info("found lost deliveries", extra={"num_jobs": len(lost)})
                await self._take(lost)
        if not self._order.may_take.is_set():
            await self._wait_for(self._order.may_take)
            return
        count = self._num_to_take()
        if count == 0:
            if not self._engine.is_failing:
                await self._oversubscribe()
                self._overtake()
            await self._wait_for_slots()
            return
        suspects = self._nothing_waits or not self._engine.is_failing
        recovered = await self._queue.recover(self._worker_id, count, suspects=suspects)
        if recovered:
            log.info("recovered jobs of other workers", extra={"num_jobs": len(recovered)})
            await self._take(recovered)
            count = self._num_to_take()
        if count == 0:
            return
        pulled = await self._queue.pull(self._worker_id, count, self._pull_block_ms)
        self._nothing_waits = not (recovered or pulled)
        if pulled:
            await self._take(pulled)

    async def _oversubscribe(self) -> None:
        """Takes jobs of tenants that hold few running slots, recovered jobs first.

        Otherwise a worker whose slots never come free would leave the jobs of a dead worker to
        their deadlines.
        """
        more = self._estimator.oversubscription()
        if more is None:
            return
        # One of a later lane would get no slot, also one that was given back for this reason.
        lanes = [job.job.lane for job in self._jobs if _num_in_engine(job)]
        before = 1 + max(lanes, default=NUM_LANES - 1)
        taken = await self._queue.recover(self._worker_id, more.count, before=before)
        if not taken:
            taken = await self._queue.oversubscribe(self._worker_id, more.count, more.leave_out)
        if taken:
            await self._take(taken)

    def _overtake(self) -> None:
        """Waits beside the rest for jobs of lanes before the lowest that runs here: the engine
        preempts its sequences for them."""
        if self._overtaking is not None or self._is_reconcile_due():
            return
        more = self._estimator.overtaking()
        if more is None:
            return
        self._overtaking = asyncio.create_task(self._take_overtaking(more), name="overtaking")

    async def _take_overtaking(self, more: Overtaking) -> None:
        taken = await self._queue.recover(self._worker_id, more.count, before=more.lane)
        if not taken:
            block_ms = self._pull_block_ms
            taken = await self._queue.overtake(self._worker_id, more.count, more.lane, block_ms)
        if taken:
            await self._take(taken)

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        if self._engine.up.is_set():
            self._estimator.took(deliveries)
            for delivery in deliveries:
                self._admit(delivery)
            return
        # The engine died meanwhile. Its successor may take minutes to load; other workers need not.
        for delivery in deliveries:
            await self._queue.release(self._worker_id, delivery.job.job_id, delivery.attempt)

    def _num_to_take(self) -> int:
        """Returns how many choices to take; after a device failure, one job at a time."""
        count = self._estimator()
        if self._engine.is_failing:
            return min(count, 0 if self._jobs.num_in_engine else 1)
        return count

    async def _wait_for_slots(self) -> None:
        self._jobs.changed.clear()
        if self._num_to_take():
            return
        is_polled = self._jobs.free_slots or self._estimator.oversubscription() is not None
        await self._wait_for(self._jobs.changed, POLL_INTERVAL_S if is_polled else math.inf)

    async def _wait_for(self, event: asyncio.Event, at_most_s: float = math.inf) -> None:
        """Waits at the longest until lost deliveries are to be looked for. The wait for jobs that
        overtake ends before that."""
        if self._overtaking is not None:
            await first_of(event.wait(), self._overtaking, timeout_s=at_most_s)
            return
        left_s = max(0.0, self._reconcile_at_s - time.monotonic())
        await first_of(event.wait(), timeout_s=min(left_s, at_most_s))

    def _is_reconcile_due(self) -> bool:
        return time.monotonic() >= self._reconcile_at_s


AVERAGED_PROMPTS = 16  # over which the usual length of a prompt is averaged
MAX_NOT_BEGUN = 32  # choices that wait here for their first token, while slots are free


@dataclass(frozen=True, slots=True)
class Oversubscription:
    """Number of jobs to take although all slots are taken, and tenants that would get no slot."""

    count: int
    leave_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overtaking:
    """Number of jobs of lanes before `lane` to take although all slots are taken."""

    count: int
    lane: int


class AdmissionEstimator:
    """Estimates how many more choices this worker should take from the queue now.

    Called before each pull; `took` reports the deliveries. A free slot is not enough: a job whose
    prompt finds no KV blocks would wait here, while another worker may have them, so at most one
    such job is taken, which keeps the engine busy. A burst is divided among all workers, a few
    steps' prompts at a time. A free slot is not always needed either: the engine preempts
    sequences of tenants and jobs that hold many slots (worker/engine/running_slots.py).

    The blocks of jobs with a first token are known. A job that waits, or is in its prefill, counts
    with the tokens that it needs, so that a worker takes too few rather than too many jobs during
    a long prefill. The next prompt is assumed to be as long as the last ones on average, the first
    one as long as the model allows.
    """

    def __init__(self, jobs: RunningJobs, engine: EngineState) -> None:
        self._jobs = jobs
        self._engine = engine
        self._usual_tokens = 0.0  # 0.0: not known yet

    def __call__(self) -> int:
        """Returns a number of choices; 0 also while a job that does not fit waits in the engine."""
        slots = self._jobs.free_slots
        ready = self._engine.ready
        if slots == 0 or ready is None:
            return slots
        waiting = self._not_begun()
        # Jobs for vectors have no first token: their prompts alone are counted, below.
        num_waiting = sum(_num_in_engine(job) for job in waiting if job.job.pooling is None)
        slots = min(slots, MAX_NOT_BEGUN - num_waiting)
        if slots <= 0:
            return 0
        not_begun = sum(ready.config.held_tokens(_tokens(job)) for job in waiting)
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.config.block_size - not_begun
        usual = _usual(self._usual_tokens, ready.config)
        fitting = int(free_tokens // usual)
        if fitting < 1:
            return 0 if not_begun else 1
        return min(slots, fitting)

    def oversubscription(self) -> Oversubscription | None:
        """Returns the jobs to take while no slot is free; None if none of them would get a slot.

        Without it one tenant's long or waiting jobs would keep all others out.
        """
        ready, num_slots = self._engine.ready, self._jobs.max_num_seqs
        if ready is None or self() or self._is_table_full():
            return None
        waiting = self._not_begun()
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.config.block_size
        free_tokens -= sum(ready.config.held_tokens(_tokens(job)) for job in waiting)
        fits = free_tokens >= _usual(self._usual_tokens, ready.config)
        slots, widest = Counter[str](), Counter[str]()
        for job in self._jobs:
            held = _num_in_engine(job)
            tenant = job.job.tenant
            slots[tenant] += held
            widest[tenant] = max(widest[tenant], held)
        most = max(slots.values(), default=0)
        if most < MIN_GAP:
            return None
        leave_out = [t for t in slots if most - slots[t] < MIN_GAP and widest[t] < MIN_GAP]
        # Waiting jobs of the other tenants get a slot soon, and count as taken already.
        num_soon = sum(job.job.tenant not in leave_out for job in waiting)
        count = (max(1, num_slots // OVERSUBSCRIBED) if fits else 1) - num_soon
        return Oversubscription(count, tuple(leave_out)) if count > 0 else None

    def overtaking(self) -> Overtaking | None:
        """Returns the jobs to take for which the engine preempts sequences of the lowest lane that
        runs here; None while a place is free, or if none would be preempted."""
        ready = self._engine.ready
        if ready is None or not ready.config.preempts or self() or self._is_table_full():
            return None
        lanes = Counter(
            job.job.lane
            for job in self._jobs
            for choice in job.choices
            if choice.has_slot and choice.num_lane_preemptions < MAX_LANE_PREEMPTIONS
        )
        lane = max(lanes, default=0)
        if lane == 0:
            return None
        # Those that wait in the engine, preempted ones and jobs that have just overtaken.
        waiting = self._jobs.num_in_engine - self._jobs.max_num_seqs
        soon = sum(_num_in_engine(job) for job in self._not_begun() if job.job.lane < lane)
        count = lanes[lane] - max(waiting, soon)
        return Overtaking(count, lane) if count > 0 else None

    def _is_table_full(self) -> bool:
        num_slots = self._jobs.max_num_seqs
        return (
            len(self._jobs) >= 2 * num_slots
            or self._jobs.num_in_engine >= 2 * num_slots + MAX_CHOICES
        )

    def _not_begun(self) -> list[RunningJob]:
        return [job for job in self._jobs if job.in_engine and job.first_token_s is None]

    def took(self, deliveries: Sequence[Delivery]) -> None:
        """Updates the average prompt length."""
        for delivery in deliveries:
            length = len(delivery.job.prompt_token_ids)
            if self._usual_tokens == 0.0:
                self._usual_tokens = length
            self._usual_tokens += (length - self._usual_tokens) / AVERAGED_PROMPTS


def _num_in_engine(job: RunningJob) -> int:
    return sum(choice.has_slot for choice in job.choices)


def _usual(num_tokens: float, config: EngineConfig) -> int:
    """Returns the token positions that a prompt of the usual length, or of the longest where none
    was seen, holds: at least those of a block."""
    length = math.ceil(num_tokens or config.max_model_len)
    return config.held_tokens(max(length, config.block_size))


def _tokens(job: RunningJob) -> int:
    """Returns the tokens of its first step: the prompt once, and each choice's earlier output."""
    return len(job.job.prompt_token_ids) + job.num_resumed
