"""StatsReader: EngineStats from the figures that vLLM gives its stat loggers after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import LLMEngine
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from worker.engine.config import EngineConfig
from worker.engine.measures import PrefixChanges, StepMeasures
from worker.engine.request import EngineStats
from worker.engines.vllm.vllm_compat import block_pool_of


def num_hashed_blocks(llm: LLMEngine) -> int:
    """Returns how many blocks have a content that can be found, held or not.

    vLLM reports no such figure: it is the size of the scheduler's own table, which is in this
    process.
    """
    return len(block_pool_of(llm).cached_block_hash_to_block)


class StatsReader:
    """Keeps the last figures of one engine; `logger` is a factory for vLLM's stat logger."""

    def __init__(self) -> None:
        self.drain_masks: Callable[[], dict[str, float]] = dict  # see StepMeasures
        self.drain_prefixes: Callable[[], PrefixChanges] = tuple  # likewise
        self.reset()

    def reset(self) -> None:
        """Restarts the counts: the steps of a warm-up are not counted."""
        self._scheduler = SchedulerStats()
        self._steps = self._preemptions = self._queries = self._hits = 0
        self._prompt_tokens = self._generated_tokens = 0
        self.measures = StepMeasures(lambda: self.drain_masks(), lambda: self.drain_prefixes())

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Returns a stat logger that records here."""
        return _Logger(self, vllm_config, engine_index)

    def record(self, scheduler: SchedulerStats | None, step: IterationStats | None) -> None:
        """Takes the figures of one step."""
        if scheduler is not None:
            self._steps += 1
            self._scheduler = scheduler
            cache = scheduler.prefix_cache_stats
            self._queries += cache.queries + cache.preempted_queries
            self._hits += cache.hits + cache.preempted_hits
            self.measures.sequences.observe(scheduler.num_running_reqs)
        if step is not None:
            self.measures.tokens.observe(step.num_prompt_tokens + step.num_generation_tokens)
            self._preemptions += step.num_preempted_reqs
            self._prompt_tokens += step.num_prompt_tokens
            self._generated_tokens += step.num_generation_tokens

    def uncount_prompt(self, num_tokens: int) -> None:
        """Takes back the prompt of a request that has returned to vLLM: it was counted before."""
        self._prompt_tokens -= num_tokens

    def engine_stats(
        self,
        config: EngineConfig,
        *,
        num_live: int,
        num_inside: int,
        num_without_token: int,
        num_preempted: int,
        num_hashed: int,
    ) -> EngineStats:
        """Returns the figures now, when `num_live` requests are left.

        `num_inside` of them are inside vLLM, some without a token since they entered. A step's
        figures do not include later cancels. `num_hashed`: blocks whose content can be found, held
        or not.
        """
        last = self._scheduler if num_inside else SchedulerStats()
        running = min(last.num_running_reqs, num_inside)
        prefilling = min(running, max(0, num_without_token - (num_inside - running)))
        used = round(last.kv_cache_usage * config.num_blocks)
        return EngineStats(
            step=self._steps,
            waiting=num_live - running,
            prefilling=prefilling,
            active=running - prefilling,
            running=running,
            preemptions=self._preemptions + num_preempted,
            free_blocks=config.num_blocks - used,
            # Each running request has a block that is not full yet, and so is not found.
            cached_blocks=min(config.num_blocks - used, max(0, num_hashed - used + running)),
            total_blocks=config.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=self._queries,
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
