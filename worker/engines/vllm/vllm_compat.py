"""What Penstock uses of vLLM beyond its public interface, in the releases that it was tried with.

This module alone reaches into vLLM's engine. `uses` names all of it, and what subclasses of vLLM's
classes override (`grammars`, `sampler`, `stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from shared.compat import IncompatibleLibrary, check_library

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.metrics.stats import RequestStateStats
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend

TRIED = "vllm>=0.32,<0.34"


def check_vllm(version: str) -> None:
    """Raises IncompatibleLibrary if vLLM lacks an interface used here."""
    try:
        used = uses()
    except ImportError as error:
        raise IncompatibleLibrary(TRIED, str(error), version) from error
    check_library(TRIED, used, version)


def uses() -> Mapping[type, Sequence[str]]:
    """Returns the names that Penstock uses, by vLLM's classes. Raises ImportError."""
    from vllm import LLMEngine
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher, KVEventBatch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerManager
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return {
        LLMEngine: (
            *("abort_request", "add_lora", "add_request", "apply_model", "collective_rpc", "step"),
            *("has_unfinished_requests", "vllm_config", "engine_core"),
            *("logger_manager", "output_processor"),
        ),
        InprocClient: ("engine_core",),
        EngineCore: ("scheduler",),
        Scheduler: ("waiting", "requests", "kv_cache_manager", "kv_event_publisher"),
        EventPublisher: ("publish",),
        KVEventBatch: ("events",),
        BlockStored: (
            *("block_hashes", "block_size", "parent_block_hash", "token_ids", "extra_keys"),
            *("group_idx", "kv_cache_spec_kind", "lora_name", "medium"),
        ),
        BlockRemoved: ("block_hashes", "group_idx", "medium"),
        RequestQueue: ("peek_request", "__iter__", "__bool__"),
        KVCacheManager: ("free", "get_blocks", "block_pool"),
        BlockPool: ("evict_blocks", "get_num_free_blocks", "cached_block_hash_to_block"),
        KVCacheBlock: ("block_id", "ref_cnt", "is_null"),
        OutputProcessor: ("request_states",),
        RequestState: ("stats",),
        StatLoggerManager: ("stat_loggers",),
        StatLoggerBase: ("record",),
        LogitsProcessor: ("apply", "is_argmax_invariant", "update_state"),
        GuidanceBackend: ("compile_grammar", "ll_tokenizer", "vocab_size"),
        GuidanceGrammar: ("fill_bitmask", "ll_matcher"),
        GPUModelRunner: ("kv_caches", "input_batch"),
        InputBatch: ("logitsprocs",),
    }


def scheduler_of(llm: LLMEngine) -> Any:
    """Returns the scheduler, which is in this process."""
    return llm.engine_core.engine_core.scheduler


def block_pool_of(llm: LLMEngine) -> Any:
    """Returns the pool of the device's KV blocks."""
    return scheduler_of(llm).kv_cache_manager.block_pool


def blocks_of(llm: LLMEngine, vllm_id: str) -> list[KVCacheBlock]:
    """Returns the KV blocks of a request that vLLM's scheduler has."""
    groups = scheduler_of(llm).kv_cache_manager.get_blocks(vllm_id).blocks
    return [block for group in groups for block in group if not block.is_null]


def call_before_free(llm: LLMEngine, note: Callable[[str], None]) -> None:
    """Has vLLM call `note` with a request's id before it frees the request's blocks.

    It frees those of a request that has all its tokens before its tokens are seen.
    """
    manager = scheduler_of(llm).kv_cache_manager
    free = manager.free

    def note_and_free(request: Any) -> None:
        note(request.request_id)
        free(request)

    manager.free = note_and_free


def call_with_events(llm: LLMEngine, take: Callable[[Sequence[Any]], None]) -> None:
    """Has vLLM call `take` with the events of its KV cache, after each step with some, if they are
    enabled (`kv_events_config`)."""
    publisher = scheduler_of(llm).kv_event_publisher
    publish = publisher.publish

    def take_and_publish(batch: Any) -> None:
        take(batch.events)
        publish(batch)

    publisher.publish = take_and_publish


def starved_ids(llm: LLMEngine) -> Set[str]:
    """Returns the ids, as in vLLM's scheduler, of requests without blocks after a step.

    vLLM starts waiting requests in their order. So all of them starve when the free blocks do not
    hold the first one's tokens; otherwise they wait for a place in a step.
    """
    waiting = scheduler_of(llm).waiting
    if not waiting:
        return frozenset()
    num_free_tokens = (
        block_pool_of(llm).get_num_free_blocks() * llm.vllm_config.cache_config.block_size
    )
    if waiting.peek_request().num_tokens <= num_free_tokens:
        return frozenset()
    return {request.request_id for request in waiting}


def stats_of(llm: LLMEngine, vllm_id: str) -> RequestStateStats | None:
    """Returns what vLLM counts of a request that was just added."""
    stats: RequestStateStats | None = llm.output_processor.request_states[vllm_id].stats
    return stats


def drop_own_stat_loggers(llm: LLMEngine) -> None:
    """Leaves the stat logger that was given: vLLM's own, for its servers, have no reader here."""
    del llm.logger_manager.stat_loggers[1:]


def use_guidance_backend(backend: type[GuidanceBackend]) -> None:
    """Has vLLM compile grammars by `backend` from its first one on."""
    from vllm.v1 import structured_output

    structured_output.GuidanceBackend = backend


def kv_caches_of(worker: Any) -> Sequence[Any]:
    """Returns the layers' KV caches of one of vLLM's workers."""
    caches: Sequence[Any] = worker.model_runner.kv_caches
    return caches


def logits_processors_of(worker: Any) -> Sequence[LogitsProcessor]:
    """Returns the logits processors of one of vLLM's workers."""
    processors: Sequence[LogitsProcessor] = worker.model_runner.input_batch.logitsprocs.all
    return processors
