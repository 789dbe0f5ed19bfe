"""EngineOptions as arguments of vLLM's EngineArgs. Imports nothing of vLLM."""

from __future__ import annotations

import json
import os
from typing import Any

from worker.engine_options import EngineOptions

PROCESSOR = "worker.vllm.sampler:PenstockLogitsProcessor"
CPU_BLOCK_SIZE = 32  # vLLM's own is 128, of which short prompts share little
MAX_TOP = 32  # log probabilities of a prompt's token: more than a request may have

_HOST_SHARE = 0.5  # of the free memory, for the KV cache
_DEVICE_SHARE = 0.9  # of a device that several workers use
_HOST_LIMIT_BYTES = 4 << 30

# Read by vLLM when it is imported, unless the operator sets them.
ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go where this process's go
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers on one machine would take the same cores
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
FIXED_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is one of its own already
    # The second has another interface for samplers, which shows no tokens to the host.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def set_environment() -> None:
    """Sets what vLLM reads from the environment of this process; before it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FIXED_ENVIRONMENT)


def engine_args(options: EngineOptions, *, device: str, free_bytes: int) -> dict[str, Any]:
    """Returns the arguments of EngineArgs for a `device` type that has `free_bytes` of memory.

    Raises ValueError with a sentence for options that exclude each other.
    """
    if options.device not in ("auto", device):
        raise ValueError(
            f"DEVICE={options.device}: the vLLM in ENGINE_PYTHON is built for {device!r}"
        )
    args: dict[str, Any] = {
        "model": options.checkpoint,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(options.max_num_batched_tokens, options.max_num_seqs),
        "enable_prefix_caching": options.prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "block_size": options.block_size or (CPU_BLOCK_SIZE if device == "cpu" else None),
        "generation_config": "vllm",  # what a request leaves out is filled in by the frontend
        "logits_processors": [PROCESSOR],
        "max_logprobs": MAX_TOP,
    }
    if options.num_kv_blocks is not None:
        args["num_gpu_blocks_override"] = options.num_kv_blocks + 1  # one is vLLM's null block
    if options.kv_cache_memory_gb is not None:
        args["kv_cache_memory_bytes"] = int(options.kv_cache_memory_gb * 2**30)
    elif device == "cpu":
        share = free_bytes * options.memory_share * _HOST_SHARE
        args["kv_cache_memory_bytes"] = min(int(share), _HOST_LIMIT_BYTES)
    elif options.memory_share < 1:
        # Of the device's whole memory, and of all that the engine takes there.
        args["gpu_memory_utilization"] = round(_DEVICE_SHARE * options.memory_share, 4)
    if options.vllm_args:
        args |= json.loads(options.vllm_args)
    return {name: value for name, value in args.items() if value is not None}
