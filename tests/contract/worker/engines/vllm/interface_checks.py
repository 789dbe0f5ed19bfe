"""Runs in vLLM's interpreter: what worker.engines.vllm relies upon in vLLM, and what is missing.

    python interface_checks.py DESCRIPTOR

writes as JSON its version and two lists of sentences: what is missing, and what would be without
one method.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, get_args

from shared.compat import missing_names
from worker.engines.vllm.options import (
    ENVIRONMENT,
    FIXED_ENVIRONMENT,
    LORA_RANKS,
    SET_BY_SETTINGS,
    SET_BY_THE_WORKER,
    set_environment,
)
from worker.engines.vllm.vllm_compat import uses

set_environment({})

import vllm  # noqa: E402
import vllm.envs  # noqa: E402
from vllm import EngineArgs, LLMEngine  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, VllmConfig  # noqa: E402
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import (  # noqa: E402
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerManager  # noqa: E402
from vllm.v1.metrics.stats import (  # noqa: E402
    IterationStats,
    PrefixCacheStats,
    RequestStateStats,
    SchedulerStats,
)
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.sample.logits_processor import (  # noqa: E402
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
)
from vllm.v1.worker import gpu_model_runner  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu.sample import logits_processor as second_runner  # noqa: E402

PARAMETERS = {
    LLMEngine.from_engine_args: ("engine_args", "stat_loggers"),
    LLMEngine.add_lora: ("lora_request",),
    LLMEngine.add_request: ("request_id", "prompt", "params", "lora_request", "priority"),
    LLMEngine.abort_request: ("request_ids",),
    LLMEngine.collective_rpc: ("method", "args"),
    LLMEngine.apply_model: ("func",),
    RequestOutput.__init__: ("request_id", "prompt_logprobs", "outputs", "finished"),
    tokens_input: ("prompt_token_ids", "cache_salt"),
    StatLoggerBase.__init__: ("vllm_config", "engine_index"),
    StatLoggerBase.record: (
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ),
    StatLoggerManager.record: ("scheduler_stats", "iteration_stats"),
    KVCacheManager.free: ("request",),
    KVCacheManager.get_blocks: ("request_id",),
    BlockPool.evict_blocks: ("block_ids",),
    LogitsProcessor.__init__: ("vllm_config", "device", "is_pin_memory"),
    LogitsProcessor.apply: ("logits",),
    LogitsProcessor.update_state: ("batch_update",),
    # Of model runner V2, to which our processor does not fit yet (docs/adr/0043).
    second_runner.LogitsProcessor.__init__: ("vllm_config", "req_states"),
    second_runner.LogitsProcessor.add_request: ("req_idx", "sampling_params"),
    second_runner.LogitsProcessor.apply: ("logits", "ctx"),
}
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    LLMEngine: ("tokenizer",),
    RequestOutputKind: ("DELTA",),
    StructuredOutputsParams: ("json", "regex", "grammar"),
    MoveDirectionality: ("SWAP",),
    BlockHashToBlockMap: ("__len__",),
    Request: ("num_tokens",),
    ModelConfig: ("get_vocab_size", "architecture"),
    CPUWorker: ("init_device", "load_model"),
}
FIELDS: dict[type, tuple[str, ...]] = {
    CompletionOutput: ("token_ids", "logprobs", "finish_reason"),
    SchedulerStats: ("num_running_reqs", "kv_cache_usage", "prefix_cache_stats"),
    PrefixCacheStats: ("queries", "hits", "preempted_queries", "preempted_hits"),
    RequestStateStats: ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
    BatchUpdate: ("removed", "added", "moved"),
    CacheConfig: ("num_gpu_blocks", "block_size", "enable_prefix_caching", "kv_cache_size_tokens"),
    second_runner.LogitsContext: ("expanded_idx_mapping", "idx_mapping_np", "pos"),
    second_runner.LogitsProcRequestState: ("all_token_ids", "prompt_len", "total_len"),
    ModelConfig: ("model", "max_model_len", "dtype", "quantization"),
    VllmConfig: (
        "model_config",
        "cache_config",
        "scheduler_config",
        "parallel_config",
        "device_config",
    ),
}
# What worker.engines.vllm.requests and worker.engines.vllm.engine give to vLLM's SamplingParams.
OF_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
    "detokenize",
    "output_kind",
    "skip_clone",
    "extra_args",
)
OTHER_ARGUMENTS = {
    "load_format",
    "speculative_config",
    "spec_method",
    "spec_model",
    "async_scheduling",
    "nnodes",
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "worker_cls",
    "max_loras",
    "max_lora_rank",
}
# Assigned to themselves by objects that cannot be made here: the names stand in their source.
IN_SOURCE: dict[Any, tuple[str, ...]] = {
    IterationStats: (
        "self.num_preempted_reqs",
        "self.num_generation_tokens",
        "def num_prompt_tokens",
    ),
    RequestOutput: ("self.num_cached_tokens",),
    OutputProcessor: ("self.request_states[request_id]",),
    LogitsProcessors: ("def all",),
    gpu_model_runner: ("Starting to load model", "Model loading took"),
}


def missing() -> Iterator[str]:
    """Yields a sentence for each thing that is not as worker.engines.vllm has it."""
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in sorted(({*SET_BY_SETTINGS} | SET_BY_THE_WORKER | OTHER_ARGUMENTS) - fields):
        yield f"EngineArgs has no {name!r}"
    for function, names in PARAMETERS.items():
        known = inspect.signature(function).parameters
        for name in names:
            if name not in known:
                yield f"{function.__qualname__} has no parameter {name!r}"
    for kind, names in uses().items():
        for name in missing_names(kind, names):
            yield f"{kind.__name__} has no {name!r}"
    for kind, names in ATTRIBUTES.items():
        for name in names:
            if not hasattr(kind, name):
                yield f"{kind.__name__} has no {name!r}"
    for kind, names in FIELDS.items():
        known_fields = {field.name for field in dataclasses.fields(kind)}
        for name in names:
            if name not in known_fields:
                yield f"{kind.__name__} has no field {name!r}"
    for name in OF_SAMPLING:
        if name not in SamplingParams.__struct_fields__:
            yield f"SamplingParams has no member {name!r}"
    for name in ("lora_name", "lora_int_id", "lora_path"):
        if name not in LoRARequest.__struct_fields__:
            yield f"LoRARequest has no member {name!r}"
    if get_args(MaxLoRARanks) != LORA_RANKS:
        yield f"max_lora_rank has other values than {LORA_RANKS}"
    for source, texts in IN_SOURCE.items():
        for text in texts:
            if text not in inspect.getsource(source):
                yield f"{source.__name__} has no {text!r} in its source"
    for name in (*ENVIRONMENT, *FIXED_ENVIRONMENT):
        if name not in vllm.envs.environment_variables:
            yield f"vLLM reads no variable {name}"
    if not issubclass(VLLMClientError, Exception):
        yield "VLLMClientError is no exception"
    if not isinstance(current_platform.device_type, str):
        yield "current_platform has no device_type"
    abstract = {"apply", "is_argmax_invariant", "update_state", "__init__"}
    if LogitsProcessor.__abstractmethods__ != abstract:
        yield f"LogitsProcessor has other abstract methods than {sorted(abstract)}"
    if second_runner.LogitsProcessor.__abstractmethods__ != {"apply"}:
        yield "the LogitsProcessor of model runner V2 has other abstract methods"
    if StatLoggerBase.__abstractmethods__ != {"__init__", "record", "log_engine_initialized"}:
        yield "StatLoggerBase has other abstract methods"


def main() -> None:
    now = list(missing())
    del LLMEngine.has_unfinished_requests
    os.write(int(sys.argv[1]), json.dumps([vllm.__version__, now, list(missing())]).encode())


if __name__ == "__main__":
    main()
