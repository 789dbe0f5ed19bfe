"""Heartbeat: renews the worker's lease, reports its load, receives the jobs to drop.

A worker whose engine makes no progress although it has jobs stops beating, so that its lease ends
and other workers take over the jobs: a live connection is no proof of progress. Why this is a task
of the service's loop and no thread is docs/adr/0010.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shared.outages import STORE, RateLimitedOutageLog
from shared.transport.ports.deployment import Spent
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import UNKNOWN_FILES, AppendStatus, JobQueue, WorkerReport
from worker.prefix_report import PrefixReport
from worker.publisher import Output
from worker.running_jobs import RunningJobs
from worker.runtime.supervisor import EngineSupervisor
from worker.settings import WorkerSettings
from worker.standing_order import StandingOrder
from worker.traces import DROPPED

log = logging.getLogger(__name__)

STANDSTILL_S = 60.0  # of the service's loop, after which the process is worth a restart
LATE_SHARE = 0.5  # of a lease: a heartbeat that comes so late is worth a warning


class EngineHealth(Protocol):
    """Whether the engine makes progress; see EngineSupervisor."""

    @property
    def stalled(self) -> bool: ...
    @property
    def is_lost(self) -> bool: ...


class Heartbeat:
    """Sends one every `interval_s` until cancelled; `send` may be called in between."""

    def __init__(
        self,
        queue: JobQueue,
        worker_id: str,
        models: tuple[str, ...],
        jobs: RunningJobs,
        engine: EngineHealth,
        publisher: Output,
        order: StandingOrder,
        *,
        lease_ms: int,
        interval_s: float,
        stats: Callable[[], Mapping[str, float | str]],
        spent_us: Counter[str],
        on_drop: Callable[[str, int, str], None],
        on_trouble: Callable[[], None],
        prefixes: PrefixReport,
    ) -> None:
        """`on_drop(job_id, attempt, why)`: the attempt is not this worker's any more; FENCED where
        there is a later one. `spent_us`: processor time by tenant, which each heartbeat takes out.

        The publisher learns which jobs the server has, and which it has lost.
        """
        self._queue = queue
        self._worker_id = worker_id
        self._models = models
        self._jobs = jobs
        self._lease_ms = lease_ms
        self._interval_s = interval_s
        self._stats = stats
        self._spent_us = spent_us
        self._engine = engine
        self._publisher = publisher
        self._order = order
        self._on_drop = on_drop
        self._on_trouble = on_trouble
        self._prefixes = prefixes
        # After this a reply is not waited for: there is time for two more tries.
        self._timeout_s = lease_ms / 1000 / 3
        self._outage = RateLimitedOutageLog(
            log,
            failing="a heartbeat was not delivered",
            recovered="heartbeats are delivered again",
            of=STORE,
        )
        self._confirmed_s = time.monotonic()
        self._was_confirmed = False
        self._turned_s: float | None = None
        self.is_stopping = False  # of its own: it takes no jobs any more
        self.files = UNKNOWN_FILES

    @property
    def age_s(self) -> float:
        """Seconds since the last confirmed heartbeat was sent, or since the start."""
        return time.monotonic() - self._confirmed_s

    @property
    def draining(self) -> bool:
        """Whether this worker takes no new jobs: it stops, or an operator ordered it."""
        return self.is_stopping or self._order.is_draining

    @property
    def holds_lease(self) -> bool:
        """Whether a heartbeat was confirmed within the lease: this worker is known to be there."""
        return self._was_confirmed and self.age_s * 1000 <= self._lease_ms

    @property
    def turn_age_s(self) -> float:
        """Seconds since the loop's last turn, whether or not Redis answered; 0 before the
        first time."""
        return 0.0 if self._turned_s is None else time.monotonic() - self._turned_s

    async def send(self) -> None:
        """Sends one heartbeat. Raises TransportError."""
        attempts = {running.job.job_id: running.attempt for running in self._jobs}
        begin_s = time.monotonic()
        spent = [Spent(tenant, cpu_us) for tenant, cpu_us in self._spent_us.items()]
        self._spent_us.clear()
        report = WorkerReport(
            worker_id=self._worker_id,
            lease_ms=self._lease_ms,
            models=self._models,
            stats=self._stats(),
            running=tuple(attempts.items()),
            draining=self.draining,
            stalled=self._engine.stalled,
            files=self.files,
            spent=spent,
            order=self._order.order,
        )
        try:
            reply = await self._queue.heartbeat(report)
        except BaseException:  # the server may not have it: it is reported again
            self._spent_us.update({one.tenant: one.cpu_us for one in spent})
            raise
        self._confirmed_s = begin_s
        self._was_confirmed = True
        self._order.receive(reply.order)
        self._prefixes.heard(reply.num_workers, reply.num_prefixes)
        unsure = {*reply.dropped, *reply.lost, *reply.unheard}
        self._publisher.sure(attempts.keys() - unsure, begin_s)
        for job_id in reply.dropped:
            if job_id in attempts:
                why = AppendStatus.FENCED.value if job_id in reply.taken else DROPPED
                self._on_drop(job_id, attempts[job_id], why)
        for job_id in reply.lost:
            if job_id in attempts:
                self._publisher.lost(job_id, attempts[job_id])

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._turned_s = time.monotonic()
            await self._pause()
            if self._engine.is_lost and len(self._jobs):
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self.send()
                self._outage.succeeded()
            except (TransportError, TimeoutError) as error:
                self._on_trouble()
                self._outage.failed(error=str(error) or type(error).__name__)

    async def _pause(self) -> None:
        """Sleeps for an interval. Logs if the loop was blocked for half a lease or more."""
        begin_s = time.monotonic()
        await asyncio.sleep(self._interval_s)
        late_s = time.monotonic() - begin_s - self._interval_s
        if late_s * 1000 > LATE_SHARE * self._lease_ms:
            log.warning("the worker's event loop was blocked", extra={"late_s": round(late_s, 2)})


RATE_WINDOW_S = 5.0
MAX_LOAD_ERROR_CHARS = 400


@dataclass(slots=True)
class SwapCounts:
    """The swaps of a worker with several models, since its start."""

    num_swaps: int = 0
    seconds: float = 0.0
    num_failures: int = 0
    load_errors: dict[str, str] = field(default_factory=dict)  # of models that failed since

    @property
    def load_error(self) -> str:
        """Returns a line for operators; empty: no model has failed since it was last loaded."""
        models = [f"{name}: {error}" for name, error in self.load_errors.items()]
        return " ".join("; ".join(models).split())[:MAX_LOAD_ERROR_CHARS]


class LoadReport:
    """Returns, at every heartbeat, the worker's load as operators and frontends read it.

    The engine's figures are those of its last report, which may be 50 ms old.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        jobs: RunningJobs,
        supervisor: EngineSupervisor,
        publisher: Output,
        swaps: SwapCounts,
    ) -> None:
        self._swaps = swaps if settings.models else None
        self._jobs = jobs
        self._supervisor = supervisor
        self._publisher = publisher
        self._tokens_per_s = TokenRate()
        self._fixed: dict[str, float | str] = {
            "pid": os.getpid(),
            "policy": "fcfs",
            "tensor_parallel_size": settings.tensor_parallel_size,
        }

    @property
    def num_pending(self) -> int:
        """Sequences that were sent to the engine and not yet seen by it."""
        engine = self._supervisor.stats
        in_engine = engine.get("waiting", 0) + engine.get("running", 0)
        return max(0, self._jobs.num_in_engine - in_engine)

    def __call__(self) -> dict[str, float | str]:
        engine = self._supervisor.stats
        ready = self._supervisor.ready
        stats: dict[str, float | str] = {
            **self._fixed,
            **engine,
            "pending": self.num_pending,
            "jobs": len(self._jobs),
            "max_num_seqs": self._jobs.max_num_seqs,
            "step_age_s": round(self._supervisor.step_age_s, 3),
            "engine_up": int(self._supervisor.up.is_set()),
            "engine_pid": self._supervisor.pid or 0,
            "engine_restarts": self._supervisor.num_restarts,
            "device_failures": self._supervisor.num_device_failures,
            "unflushed_tokens": self._publisher.num_unsent_total,
            # As text: by lane, and none where none was preempted for a higher one.
            "lane_preemptions": " ".join(
                f"{lane}:{num}" for lane, num in sorted(self._jobs.num_preempted.items())
            ),
            "tok_s": self._tokens_per_s(engine.get("generated_tokens", 0)),
        }
        if self._swaps is not None:
            stats["model_swaps"] = self._swaps.num_swaps
            stats["model_load_error"] = self._swaps.load_error
        if ready is not None:
            stats["engine"] = ready.engine_name
            stats["engine_version"] = ready.engine_version
            stats["exact_resume"] = int(ready.exact_resume)
            stats["structured_output"] = int(ready.config.structured_output)
            stats["block_size"] = ready.config.block_size
            stats["max_model_len"] = ready.config.max_model_len
            stats["max_num_batched_tokens"] = ready.config.max_num_batched_tokens
            stats["kv_capacity_tokens"] = ready.config.sequence_capacity_tokens
        return stats


class TokenRate:
    """Tokens per second from a counter, averaged over RATE_WINDOW_S with exponential weights."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()
        self._num_tokens = 0
        self._rate = 0.0

    def __call__(self, num_tokens: int) -> float:
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._at_s, 1e-3)
        # A counter that went back is a new engine's.
        grown = num_tokens - self._num_tokens if num_tokens >= self._num_tokens else num_tokens
        weight = min(1.0, elapsed_s / RATE_WINDOW_S)
        self._rate += weight * (grown / elapsed_s - self._rate)
        self._at_s, self._num_tokens = now_s, num_tokens
        return round(self._rate, 1)


class WorkerProbes:
    """Answers an orchestrator: whether the worker takes jobs, and whether to replace it.

    Each method returns why the answer is no, as one sentence, or nothing. The listener's thread
    reads state, so an answer comes while the service's loop is busy, and reports a loop that is
    blocked.
    """

    def __init__(self, supervisor: EngineSupervisor, heartbeat: Heartbeat) -> None:
        self._supervisor = supervisor
        self._heartbeat = heartbeat

    def by_path(self, path: str) -> str | None:
        """Returns the answer to a path of the listener; None: it is no probe's."""
        if path == "/ready":
            return self.not_ready()
        return self.not_live() if path == "/live" else None

    def not_ready(self) -> str:
        """Returns why the worker takes no jobs; empty if the engine is up, the worker does not
        drain, and its lease in Redis is current."""
        if not self._supervisor.up.is_set():
            return "The engine is not up."
        if self._heartbeat.draining:
            return "The worker drains."
        if not self._heartbeat.holds_lease:
            return "No heartbeat was confirmed within the lease."
        return ""

    def not_live(self) -> str:
        """Returns why the process is to be replaced; empty if the service's loop turns. An
        engine that hangs is replaced by the service itself, and a store that is away is no fault
        of this process."""
        age_s = self._heartbeat.turn_age_s
        return f"The event loop has been blocked for {age_s:.0f} s." if age_s > STANDSTILL_S else ""
