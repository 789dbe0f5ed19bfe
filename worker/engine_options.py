"""EngineOptions: the one carrier of an engine's options, from WorkerSettings to `build_model`."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shared.cuda_devices import DEVICE_WORDS, device_number, is_device
from shared.messages import MAX_CHOICES, InvalidParameter
from worker.engine.config import EngineConfig

Runner = Literal["model", "echo", "pooling"]
EngineName = Literal["penstock", "vllm", "http"]
VllmSampler = Literal["auto", "penstock", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
CpuTier = Literal["auto", "reference", "packed", "native"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]  # vLLM's values
WeightCopies = Literal["auto", "on", "off"]
AttentionChoice = Literal["auto", "triton", "sdpa"]

# Token budgets of a step where none is set.
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192
ModelImpl = Literal["auto", "native", "transformers"]

OVERSUBSCRIBED = 8  # slots for each job that a worker may take without a free one


def max_waiting(max_num_seqs: int) -> int:
    """Returns how many sequences may wait in an engine: as many as its worker may take for it."""
    jobs_taken_at_once = max_num_seqs // OVERSUBSCRIBED + 1
    return 2 * max_num_seqs + (jobs_taken_at_once + 1) * MAX_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine; None leaves the choice to the code that builds it.

    A field that is also a setting has the setting's name; WorkerSettings describes it. Raises
    InvalidParameter, a ValueError, naming the option and its allowed values.
    """

    checkpoint: str  # directory with a Hugging Face checkpoint
    runner: Runner = "model"
    echo_step_ms: float = 0.0  # duration of a step of the echo runner
    engine: EngineName = "penstock"  # vllm: see worker.engines.vllm
    engine_python: str = ""  # interpreter of the engine process; empty: the service's
    vllm_args: str = ""  # JSON object of vLLM's EngineArgs
    vllm_sampler: VllmSampler = "auto"  # see worker.engines.vllm.options
    lora_modules: str = ""  # `name=directory`, separated by commas; see worker.lora
    upstream_urls: str = ""  # see worker.engines.http.options
    upstream_model: str = ""  # its name there; empty: the only one
    upstream_key_file: str = ""
    tensor_parallel_size: int = 1  # devices, or processes on a CPU, that share the model

    model_impl: ModelImpl = "auto"  # see worker.model.build.choose_source
    dtype: Dtype = "auto"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    load_format: LoadFormat = "auto"  # dummy: random weights for config.json's shapes
    num_threads: int | None = None  # CPU threads; None: `default_threads`
    cpu_tier: CpuTier = "auto"  # see worker.model.cpu.tiers
    quantization: Quantization = "none"  # int8 and int4 are for CPUs, fp8 for CUDA
    cpu_weight_copies: WeightCopies = "auto"  # see worker.model.cpu.choices
    attention_backend: AttentionChoice = "auto"  # on CUDA; see worker.model.cuda.tier
    cuda_graphs: bool = True  # see worker.model.cuda.graphs
    batch_invariant: bool = False  # see worker.model.cuda.invariant

    kv_cache_dtype: KVCacheDtype = "auto"  # the model's; see worker.model.device
    block_size: int | None = None  # token positions of a KV block
    num_kv_blocks: int | None = None  # takes precedence over kv_cache_memory_gb
    kv_cache_memory_gb: float | None = None  # GiB
    kv_offloading_gb: float = 0.0  # GiB of host memory for evicted blocks; 0: they are lost
    kv_offloading_dir: str = ""  # for blocks that those push out; empty: they are lost
    kv_offloading_dir_gb: float = 16.0
    memory_share: float = 1.0  # of the free memory, where the cache is sized from that
    max_num_seqs: int = 32  # sequences running at once
    max_num_batched_tokens: int | None = None  # token budget of one step
    max_model_len: int | None = None  # prompt and output tokens of one sequence
    max_waiting: int = 1024  # sequences waiting in the engine
    prefix_caching: bool = True
    lookahead: int | None = None  # steps launched ahead
    step_target_ms: int | None = None  # 0: no target
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # see worker.engine.queue
    structured_output: bool = True  # where the checkpoint's tokenizer and its end tokens allow it

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(EngineOptions).items():
            value = getattr(self, name)
            requirement = _requirement_missed(name, kind, value)
            if requirement is not None:
                raise InvalidParameter(name, f"must {requirement}, got {value!r}")
        if self.tensor_parallel_size > 1 and device_number(self.device) is not None:
            raise InvalidParameter("device", one_device(self.device, self.tensor_parallel_size))
        if self.kv_offloading_gb and not self.prefix_caching:
            raise InvalidParameter("kv_offloading_gb", "needs prefix_caching")
        if self.kv_offloading_gb and self.runner != "model":
            raise InvalidParameter("kv_offloading_gb", f"is not for the runner {self.runner!r}")
        if self.kv_offloading_dir and not self.kv_offloading_gb:
            raise InvalidParameter(
                "kv_offloading_dir", "needs kv_offloading_gb: blocks reach the disk from there"
            )
        if self.kv_offloading_dir and self.tensor_parallel_size > 1:
            raise InvalidParameter(
                "kv_offloading_dir", "is for tensor_parallel_size 1: ranks share no disk"
            )

    def batched_tokens(self, *, is_cuda: bool) -> int:
        """Returns the token budget of a step: the option, or the device's default."""
        default = CUDA_BATCHED_TOKENS if is_cuda else CPU_BATCHED_TOKENS
        return self.max_num_batched_tokens or default

    def engine_config(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        default_lookahead: int = 0,
        default_step_target_ms: int = 0,
        is_cuda: bool = False,
        eos_token_ids: Set[int] = frozenset(),
        structured_output: bool = False,
        windows: tuple[int | None, ...] = (None,),
    ) -> EngineConfig:
        """Returns the engine's bounds: these options, completed by the built runner."""
        lookahead = default_lookahead if self.lookahead is None else self.lookahead
        step_target_ms = self.step_target_ms
        if step_target_ms is None:
            step_target_ms = default_step_target_ms
        return EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.batched_tokens(is_cuda=is_cuda),
            max_model_len=max_model_len,
            max_waiting=self.max_waiting,
            prefix_caching=self.prefix_caching,
            lookahead=lookahead,
            policy=self.scheduling_policy,
            eos_token_ids=frozenset(eos_token_ids),
            structured_output=structured_output,
            step_target_s=step_target_ms / 1000 if step_target_ms else None,
            windows=windows,
        )


def one_device(device: str, num_ranks: int) -> str:
    """Returns why `cuda:N` is not for a model with several ranks."""
    return (
        f"{device} is one device, and the model is divided over {num_ranks}: CUDA_VISIBLE_DEVICES "
        "chooses several"
    )


_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "be True or False"),
    int: ((int,), "be an integer"),
    float: ((int, float), "be a finite number"),
    str: ((str,), "be text"),
}
_AT_LEAST_1 = (
    "tensor_parallel_size",
    "num_threads",
    "block_size",
    "num_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_waiting",
)
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_AT_LEAST_1, (lambda number: number >= 1, "be at least 1")),
    "kv_cache_memory_gb": (lambda number: number > 0, "be positive"),
    "kv_offloading_gb": (lambda number: number >= 0, "not be negative"),
    "kv_offloading_dir_gb": (lambda number: number > 0, "be positive"),
    "memory_share": (lambda number: 0 < number <= 1, "be above 0 and at most 1"),
    "lookahead": (lambda number: number in (0, 1), "be 0 or 1"),
    "step_target_ms": (lambda number: number >= 0, "not be negative"),
    "device": (is_device, f"be {DEVICE_WORDS}"),
    "echo_step_ms": (lambda number: number >= 0, "not be negative"),
}


def _requirement_missed(name: str, kind: Any, value: object) -> str | None:
    """Returns the requirement that `value` misses (choices, type or range), or None."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return None if value in choices else f"be one of {', '.join(choices)}"
    required, *optional = get_args(kind) or (kind,)
    if value is None and NoneType in optional:
        return None
    types, words = _TYPES[required]
    if not isinstance(value, types) or (isinstance(value, bool) and required is not bool):
        return words
    if isinstance(value, float) and not math.isfinite(value):
        return words
    is_within, words = _RANGES.get(name, (lambda number: True, ""))
    return None if is_within(value) else words
