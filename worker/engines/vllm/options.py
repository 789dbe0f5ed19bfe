"""EngineOptions as arguments of vLLM's EngineArgs. Imports nothing of vLLM."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import socket
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from shared.cuda_devices import (
    device_number,
    device_type,
    no_such_device,
    num_cuda_devices,
    visible_devices,
)
from worker.engine_options import (
    CPU_BATCHED_TOKENS,
    CUDA_BATCHED_TOKENS,
    EngineOptions,
    one_device,
)
from worker.lora import Adapter, read_adapters
from worker.model.config.context_length import ContextLength
from worker.model.config.gguf_header import is_gguf
from worker.model.errors import CheckpointError, ModelError

PROCESSOR = "worker.engines.vllm.sampler:PenstockLogitsProcessor"
CPU_RANK = "worker.engines.vllm.rank.CpuRank"
AS_MUCH_AS_FITS = -1  # max_model_len: the model's context, shortened to fit the KV cache
CPU_BLOCK_SIZE = 32  # vLLM's default is 128: short prompts would share few blocks
MAX_LORAS = 8  # adapters computed in one step, where VLLM_ARGS has no max_loras
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's values of max_lora_rank
MAX_TOP = 32  # log probabilities of a prompt's token: more than a request may have

# The range of vLLM's releases that the tests ran with. An older release is refused: it lacks
# interfaces that worker.engines.vllm uses. A newer one logs a warning. 0.33 is not published for
# CPUs: the tests ran with its Python code over the compiled kernels of 0.32.
OLDEST_TESTED, NEWEST_TESTED = (0, 32), (0, 33)

_HOST_SHARE = 0.5  # of the free memory, for the KV cache
_DEVICE_SHARE = 0.9  # of a device that several workers use
_HOST_LIMIT_BYTES = 4 << 30

log = logging.getLogger(__name__)

# Read by vLLM when it is imported, unless the operator sets them.
ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go where this process's go
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers on one machine would take the same cores
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
FIXED_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine already has its own process
    # The second has another interface for samplers, which shows no tokens to the host.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

# Arguments of EngineArgs that a setting of this project decides, with its name.
SET_BY_SETTINGS = {
    "model": "PENSTOCK_MODEL",
    "model_weights": "PENSTOCK_MODEL",
    "served_model_name": "PENSTOCK_SERVED_MODEL_NAME",
    "dtype": "PENSTOCK_DTYPE",
    "max_model_len": "PENSTOCK_MAX_MODEL_LEN",
    "max_num_seqs": "PENSTOCK_MAX_NUM_SEQS",
    "max_num_batched_tokens": "PENSTOCK_MAX_NUM_BATCHED_TOKENS",
    "enable_prefix_caching": "PENSTOCK_PREFIX_CACHING",
    "tensor_parallel_size": "PENSTOCK_TENSOR_PARALLEL_SIZE",
    "block_size": "PENSTOCK_BLOCK_SIZE",
    "num_gpu_blocks_override": "PENSTOCK_NUM_KV_BLOCKS",
    "kv_cache_memory_bytes": "PENSTOCK_KV_CACHE_MEMORY_GB",
    "generation_config": "PENSTOCK_GENERATION_CONFIG",
    "override_generation_config": "PENSTOCK_OVERRIDE_GENERATION_CONFIG",
    "enable_lora": "PENSTOCK_LORA_MODULES",
    "log_level": "PENSTOCK_LOG_LEVEL",
}
# Arguments on which the worker relies.
SET_BY_THE_WORKER = frozenset(
    {
        "scheduling_policy",
        "logits_processors",
        "logprobs_mode",
        "max_logprobs",
        "tokenizer",
        "tokenizer_revision",
        "runner",
        "convert",
        "enable_prompt_embeds",
        "disable_log_stats",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "aggregate_engine_logging",
        "stream_interval",
        "use_tqdm_on_load",
        "log_config_file",
        "logging_config",
        "structured_outputs_config",
        "watermark_config",
        "diffusion_config",
        "data_parallel_size",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
    }
)


def set_environment(args: Mapping[str, Any]) -> None:
    """Sets vLLM's environment variables in this process, before vLLM is imported. `args` are
    those of VLLM_ARGS."""
    for name, value in (ENVIRONMENT | _interfaces(args)).items():
        os.environ.setdefault(name, value)
    os.environ.update(FIXED_ENVIRONMENT)


def choose_device(options: EngineOptions, args: Mapping[str, Any]) -> None:
    """Shows vLLM, which takes the first devices that it sees, the one that DEVICE=cuda:N names.

    Before vLLM is imported. Raises ValueError with a sentence where it is not there.
    """
    number = device_number(options.device)
    if number is None:
        return
    if (ranks := num_ranks(options, args)) > 1:
        raise ValueError(one_device(f"PENSTOCK_DEVICE={options.device}", ranks))
    visible = visible_devices(os.environ)
    num_devices = num_cuda_devices() if visible is None else len(visible)
    if number >= num_devices:
        raise ValueError(no_such_device(options.device, num_devices))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number) if visible is None else visible[number]


def num_ranks(options: EngineOptions, args: Mapping[str, Any]) -> int:
    """Returns the processes of this machine that have a part of the model; `args` are those of
    VLLM_ARGS."""
    num_stages = args.get("pipeline_parallel_size") or 1
    num_nodes = args.get("nnodes") or 1
    return max(1, int(options.tensor_parallel_size * num_stages // num_nodes))


def share_threads(num_ranks: int) -> None:
    """Divides the threads of this process among the ranks, which read their number when they
    start; this process computes nothing itself."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in os.environ:
            os.environ[name] = str(max(1, int(os.environ[name]) // num_ranks))


def _interfaces(args: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that keep the listeners of gloo and NCCL, which take a connection from
    anybody, off the network; none where processes on other machines must reach them."""
    is_one_node = (args.get("nnodes") or 1) == 1
    is_local = args.get("distributed_executor_backend") in (None, "mp", "uni")
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not (is_one_node and is_local and loopback):
        return {}
    return {"GLOO_SOCKET_IFNAME": loopback[0], "NCCL_SOCKET_IFNAME": loopback[0]}


def parse_vllm_args(text: str) -> dict[str, Any]:
    """Returns VLLM_ARGS as a mapping. Raises ValueError for anything but a JSON object, and for a
    name that is not the operator's to set."""
    try:
        args = json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(args, dict):
        raise ValueError("must be a JSON object")
    for name in args:
        if name in SET_BY_SETTINGS:
            raise ValueError(f"{name!r} is set by {SET_BY_SETTINGS[name]}")
        if name in SET_BY_THE_WORKER:
            raise ValueError(f"{name!r} is set by the worker")
    return args


def check_types(args: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raises ValueError with a sentence for a name that EngineArgs lacks, and for a value of
    another type. `fields` are its fields with their types."""
    for name, value in args.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; is {near[0]!r} meant?" if near else ""
            raise ValueError(f"PENSTOCK_VLLM_ARGS: vLLM's EngineArgs have no {name!r}{hint}")
        words = _expected(fields[name], value)
        if words:
            raise ValueError(
                f"PENSTOCK_VLLM_ARGS: {name!r} must be {words}, got {_shown(name, value)}"
            )


def check_version(version: str) -> bool:
    """Returns whether the tests ran with this release of vLLM. Raises ValueError for one that is
    too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return False  # built from a working tree
    release = (int(found[1]), int(found[2]))
    if release < OLDEST_TESTED:
        oldest = ".".join(map(str, OLDEST_TESTED))
        raise ValueError(
            f"PENSTOCK_ENGINE_PYTHON has vLLM {version}, {oldest} is the oldest that "
            "PENSTOCK_ENGINE=vllm runs with"
        )
    return release <= NEWEST_TESTED


def uses_own_sampler(options: EngineOptions, args: Mapping[str, Any]) -> bool:
    """Returns whether this project's sampler draws the tokens, so that a resumed output continues
    exactly. Raises ValueError if VLLM_SAMPLER=penstock excludes another option."""
    if options.vllm_sampler == "vllm":
        return False
    reasons = {
        "speculative decoding": _speculates(args),
        "pipeline parallelism": (args.get("pipeline_parallel_size") or 1) > 1,
    }
    obstacles = [name for name, is_on in reasons.items() if is_on]
    if obstacles and options.vllm_sampler == "penstock":
        raise ValueError(
            f"PENSTOCK_VLLM_SAMPLER=penstock and {obstacles[0]} in PENSTOCK_VLLM_ARGS exclude each "
            "other; with PENSTOCK_VLLM_SAMPLER=vllm a resumed output continues with other tokens"
        )
    return not obstacles


def _speculates(args: Mapping[str, Any]) -> bool:
    return any(args.get(name) for name in ("speculative_config", "spec_method", "spec_model"))


def _check_device(args: Mapping[str, Any], device: str) -> None:
    """Raises ValueError for what VLLM_ARGS ask of a device type on which vLLM does not do it."""
    if device != "cpu":
        return
    if _speculates(args):
        raise ValueError(
            "PENSTOCK_VLLM_ARGS: speculative decoding is not supported on a CPU, where a request "
            "with top_k or top_p ends vLLM's engine; remove 'speculative_config'"
        )
    if args.get("async_scheduling"):
        raise ValueError("PENSTOCK_VLLM_ARGS: 'async_scheduling' has no effect on a CPU; remove it")


def engine_args(options: EngineOptions, *, device: str, free_bytes: int) -> dict[str, Any]:
    """Returns the arguments of EngineArgs for a `device` type that has `free_bytes` of memory.

    Raises ValueError with a sentence for options that exclude each other.
    """
    if device_type(options.device) not in ("auto", device):
        raise ValueError(
            f"PENSTOCK_DEVICE={options.device}: the vLLM in PENSTOCK_ENGINE_PYTHON is built for "
            f"{device!r}"
        )
    if is_gguf(Path(options.checkpoint)):
        raise ValueError(
            "PENSTOCK_ENGINE=vllm does not read GGUF files, and PENSTOCK_ENGINE=penstock does"
        )
    given = parse_vllm_args(options.vllm_args)
    _check_device(given, device)
    if options.load_format != "auto" and "load_format" in given:
        raise ValueError("PENSTOCK_VLLM_ARGS: 'load_format' is set by PENSTOCK_LOAD_FORMAT")
    default = CPU_BATCHED_TOKENS if device == "cpu" else CUDA_BATCHED_TOKENS
    budget = options.max_num_batched_tokens or default
    args: dict[str, Any] = {
        "model": options.checkpoint,
        "dtype": options.dtype,
        # vLLM's `auto` would also unpickle *.bin and *.pt.
        "load_format": "safetensors" if options.load_format == "auto" else options.load_format,
        **context_args(options.checkpoint, options.max_model_len),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(budget, options.max_num_seqs),
        "enable_prefix_caching": options.prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "block_size": options.block_size or (CPU_BLOCK_SIZE if device == "cpu" else None),
        "scheduling_policy": options.scheduling_policy,
        "generation_config": "vllm",  # the frontend fills in defaults
        "max_logprobs": MAX_TOP,
        # Each of several processes would draw its own bar.
        "use_tqdm_on_load": options.tensor_parallel_size == 1,
    }
    ranks = num_ranks(options, given)
    if device == "cpu":
        args["worker_cls"] = CPU_RANK
    if uses_own_sampler(options, given):
        args["logits_processors"] = [PROCESSOR]
    else:
        # The one of vLLM's grammar libraries that this project's grammars are written for.
        args["structured_outputs_config"] = {"backend": "guidance"}
    if options.prefix_caching:
        # For VllmPrefixes, in this process: nothing is published on a socket.
        args["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    args |= lora_args(read_adapters(options.lora_modules), given, device)
    if options.num_kv_blocks is not None:
        args["num_gpu_blocks_override"] = options.num_kv_blocks + 1  # one is vLLM's null block
    if options.kv_cache_memory_gb is not None:
        args["kv_cache_memory_bytes"] = int(options.kv_cache_memory_gb * 2**30) // ranks
    elif device == "cpu":
        share = free_bytes * options.memory_share * _HOST_SHARE
        args["kv_cache_memory_bytes"] = min(int(share), _HOST_LIMIT_BYTES) // ranks
    elif options.memory_share < 1:
        # A share of the device's whole memory, for everything that the engine takes there.
        args["gpu_memory_utilization"] = round(_DEVICE_SHARE * options.memory_share, 4)
    if isinstance(given.get("hf_overrides"), dict):
        given["hf_overrides"] = _over(args.get("hf_overrides", {}), given["hf_overrides"])
    return {name: value for name, value in (args | given).items() if value is not None}


def lora_args(
    adapters: Mapping[str, Adapter], given: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """Returns the arguments of EngineArgs that these adapters need; `given` are those of VLLM_ARGS.

    Raises ValueError with a sentence for an adapter whose rank is too large, and for too few places
    for adapters.
    """
    if not adapters:
        return {}
    num_places = min(len(adapters), MAX_LORAS)
    if device == "cpu":
        # vLLM's code for CPUs takes the last place for rows without an adapter: it must stay empty.
        num_places = len(adapters) + 1
        if given.get("max_loras", num_places) < num_places:
            raise ValueError(
                f"PENSTOCK_VLLM_ARGS: on a CPU 'max_loras' must be at least {num_places}, one more "
                "than PENSTOCK_LORA_MODULES has adapters; remove it"
            )
    widest = max(adapters.values(), key=lambda adapter: adapter.rank)
    largest = given.get("max_lora_rank", LORA_RANKS[-1])
    if widest.rank > largest:
        raise ValueError(
            f"PENSTOCK_LORA_MODULES: the adapter {widest.name!r} has the rank {widest.rank}, and "
            + (
                f"'max_lora_rank' in PENSTOCK_VLLM_ARGS is {largest}"
                if "max_lora_rank" in given
                else f"vLLM's largest is {largest}"
            )
        )
    return {
        "enable_lora": True,
        "max_loras": num_places,
        # Else vLLM drops one from the host's memory, and reads it again within a step.
        "max_cpu_loras": max(len(adapters), given.get("max_loras", num_places)),
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= widest.rank),
    }


def _over(ours: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns both overrides of a config.json in one; of a member in both, the operator's."""
    both = ours | given
    for name in ours.keys() & given.keys():
        if isinstance(ours[name], dict) and isinstance(given[name], dict):
            both[name] = _over(ours[name], given[name])
        elif ours[name] != given[name]:
            log.warning(
                "hf_overrides in PENSTOCK_VLLM_ARGS replaces a value that sets the context length",
                extra={"member": name, "given": given[name], "replaced": ours[name]},
            )
    return both


_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


_SECRET = re.compile("token|key|secret|password")


def _shown(name: str, value: Any) -> str:
    """Returns a value for an error message, without secrets."""
    if isinstance(value, (dict, list)) or _SECRET.search(name.lower()):
        return _WORDS[type(value)]
    return repr(value)


def _expected(kind: Any, value: Any) -> str:
    """Returns the description of a value of the type `kind`; empty if `value` is one, or if the
    type is not specific enough."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    words = []
    for one in kinds:
        origin = get_origin(one) or one
        if origin is Literal:
            choices = get_args(one)
            if value in choices and type(value) in map(type, choices):
                return ""
            words.append("one of " + ", ".join(map(str, choices)))
        elif origin in _WORDS:
            allowed = (int, float) if origin is float else origin
            if isinstance(value, allowed) and (origin is bool) == isinstance(value, bool):
                return ""
            words.append(_WORDS[origin])
        else:
            return ""  # vLLM makes it of the value, or refuses it
    return " or ".join(words)


def context_args(checkpoint: str, max_model_len: int | None) -> dict[str, Any]:
    """Returns the arguments of EngineArgs for the model's context, or for `max_model_len` tokens.

    Raises ModelError for more tokens than the model has positions.
    """
    config = _read_config(Path(checkpoint) / "config.json")
    context = ContextLength.of(config)
    if context is None:
        return {"max_model_len": max_model_len or AS_MUCH_AS_FITS}
    if max_model_len is not None and max_model_len > context.longest:
        raise ModelError(
            f"max_model_len {max_model_len} is more than the model's {context.longest} positions: "
            "PENSTOCK_MAX_MODEL_LEN may be at most that"
        )
    args: dict[str, Any] = {"max_model_len": max_model_len or AS_MUCH_AS_FITS}
    if max_model_len is None and context.default < context.longest:
        # vLLM would take all of them, at other frequencies than the model's own.
        args["max_model_len"] = context.default
    if context.by_yarn:
        # vLLM takes it that a file with YaRN has the extended length there already.
        extended: dict[str, Any] = {"max_position_embeddings": context.longest}
        is_nested = isinstance(config.get("text_config"), dict)
        args["hf_overrides"] = {"text_config": extended} if is_nested else extended
    return args


def _read_config(path: Path) -> dict[str, Any]:
    """Returns {} where there is no file: vLLM has formats without it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
