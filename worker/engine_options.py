"""EngineOptions: the one carrier of an engine's options, from WorkerSettings to `build_model`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from shared.messages import InvalidParameter
from worker.engine.config import EngineConfig

Runner = Literal["model", "echo"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
CpuTier = Literal["auto", "reference", "packed", "native"]
Quantization = Literal["none", "int8"]
WeightCopies = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine; None leaves the choice to the code that builds it.

    A field that is also a setting has the setting's name; WorkerSettings describes it. Raises
    InvalidParameter, a ValueError, naming the option and what it may be.
    """

    checkpoint: str  # directory with a Hugging Face checkpoint
    runner: Runner = "model"
    echo_step_ms: float = 0.0  # duration of a step of the echo runner

    dtype: Dtype = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"  # dummy: random weights for config.json's shapes
    num_threads: int | None = None  # CPU threads; None: `default_threads`
    cpu_tier: CpuTier = "auto"  # see worker.model.cpu.tiers
    quantization: Quantization = "none"  # int8, CPU only; see worker.model.cpu.onednn_ops
    cpu_weight_copies: WeightCopies = "auto"  # see worker.model.cpu.choices

    block_size: int | None = None  # token positions of a KV block
    num_kv_blocks: int | None = None  # takes precedence over kv_cache_memory_gb
    kv_cache_memory_gb: float | None = None  # GiB
    max_num_seqs: int = 32  # sequences running at once
    max_num_batched_tokens: int = 512  # token budget of one step
    max_model_len: int | None = None  # prompt and output tokens of one sequence
    max_waiting: int = 1024  # sequences waiting in the engine
    prefix_caching: bool = True
    lookahead: int | None = None  # steps launched ahead
    step_target_ms: int | None = None  # 0: no target
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # see worker.engine.queue
    structured_output: bool = True  # where the checkpoint's tokenizer and its end tokens allow it

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(EngineOptions).items():
            choices, value = get_args(kind), getattr(self, name)
            if get_origin(kind) is Literal and value not in choices:
                raise InvalidParameter(name, f"must be one of {', '.join(choices)}, got {value!r}")
        for name in (
            "block_size",
            "num_kv_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(name, f"must be at least 1, got {value}")
        if self.kv_cache_memory_gb is not None and self.kv_cache_memory_gb <= 0:
            raise InvalidParameter(
                "kv_cache_memory_gb", f"must be positive, got {self.kv_cache_memory_gb}"
            )
        if self.lookahead not in (None, 0, 1):
            raise InvalidParameter("lookahead", f"must be 0 or 1, got {self.lookahead}")
        if self.step_target_ms is not None and self.step_target_ms < 0:
            raise InvalidParameter(
                "step_target_ms", f"must not be negative, got {self.step_target_ms}"
            )

    def engine_config(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        default_lookahead: int = 0,
        default_step_target_ms: int = 0,
        eos_token_ids: Set[int] = frozenset(),
        structured_output: bool = False,
    ) -> EngineConfig:
        """Returns the engine's bounds: these options, with what the built runner decides.

        The default step target holds without lookahead only. Raises ValueError for options that
        exclude each other.
        """
        lookahead = default_lookahead if self.lookahead is None else self.lookahead
        step_target_ms = self.step_target_ms
        if step_target_ms is None:
            step_target_ms = 0 if lookahead else default_step_target_ms
        return EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=self.max_waiting,
            prefix_caching=self.prefix_caching,
            lookahead=lookahead,
            policy=self.scheduling_policy,
            eos_token_ids=frozenset(eos_token_ids),
            structured_output=structured_output,
            step_target_s=step_target_ms / 1000 if step_target_ms else None,
        )
