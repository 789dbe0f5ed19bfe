"""LoadReport: what a heartbeat says of this worker's load, as operators and frontends read it."""

from __future__ import annotations

import os
import time

from worker.engine_supervisor import EngineSupervisor
from worker.publisher import Publisher
from worker.running_jobs import RunningJobs
from worker.settings import WorkerSettings

RATE_WINDOW_S = 5.0


class LoadReport:
    """Called at every beat. Engine figures are those of its last word, at most a step old."""

    def __init__(
        self,
        settings: WorkerSettings,
        jobs: RunningJobs,
        supervisor: EngineSupervisor,
        publisher: Publisher,
    ) -> None:
        self._jobs = jobs
        self._supervisor = supervisor
        self._publisher = publisher
        self._tokens_per_s = TokenRate()
        self._fixed: dict[str, float | str] = {
            "pid": os.getpid(),
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "policy": settings.scheduling_policy.value,
        }

    def __call__(self) -> dict[str, float | str]:
        engine = self._supervisor.stats
        ready = self._supervisor.ready
        in_engine = engine.get("waiting", 0) + engine.get("running", 0)
        stats: dict[str, float | str] = {
            **self._fixed,
            **engine,
            # Sent to the engine and not yet seen by it.
            "pending": max(0, self._jobs.num_in_engine - in_engine),
            "jobs": len(self._jobs),
            "step_age_s": round(self._supervisor.step_age_s, 3),
            "engine_up": int(self._supervisor.up.is_set()),
            "engine_pid": self._supervisor.pid or 0,
            "engine_restarts": self._supervisor.num_restarts,
            "device_failures": self._supervisor.num_device_failures,
            "unflushed_tokens": self._publisher.num_unsent_total,
            "tok_s": self._tokens_per_s(engine.get("generated_tokens", 0)),
        }
        if ready is not None:
            stats["block_size"] = ready.block_size
            stats["max_model_len"] = ready.max_model_len
            stats["kv_capacity_tokens"] = ready.kv_capacity_tokens
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
