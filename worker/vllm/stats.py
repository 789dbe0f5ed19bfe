"""StatsReader: EngineStats from the figures that vLLM gives its stat loggers."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from worker.engine.config import EngineConfig
from worker.engine.request import EngineStats


class StatsReader:
    """Keeps the last figures of one engine; `logger` is what vLLM makes its stat logger with."""

    def __init__(self) -> None:
        self._scheduler = SchedulerStats()
        self._steps = self._preemptions = self._hits = 0
        self._prompt_tokens = self._generated_tokens = 0

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Returns a stat logger that records here."""
        return _Logger(self, vllm_config, engine_index)

    def record(self, scheduler: SchedulerStats | None, step: IterationStats | None) -> None:
        """Takes the figures of one step."""
        if scheduler is not None:
            self._steps += 1
            self._scheduler = scheduler
            cache = scheduler.prefix_cache_stats
            self._hits += cache.hits + cache.preempted_hits
        if step is not None:
            self._preemptions += step.num_preempted_reqs
            self._prompt_tokens += step.num_prompt_tokens
            self._generated_tokens += step.num_generation_tokens

    def engine_stats(self, config: EngineConfig, *, is_idle: bool) -> EngineStats:
        """Returns the figures; `is_idle`: no request is left since the last step."""
        last = SchedulerStats() if is_idle else self._scheduler
        used = round(last.kv_cache_usage * config.num_blocks)
        return EngineStats(
            step=self._steps,
            waiting=last.num_waiting_reqs + last.num_skipped_waiting_reqs,
            prefilling=0,
            active=last.num_running_reqs,
            running=last.num_running_reqs,
            preemptions=self._preemptions,
            free_blocks=config.num_blocks - used,
            cached_blocks=0,
            total_blocks=config.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_hit_tokens=self._hits,
            mixed_steps=0,
            failed_steps=0,
        )


class _Logger(StatLoggerBase):
    def __init__(self, reader: StatsReader, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._reader = reader

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._reader.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass
