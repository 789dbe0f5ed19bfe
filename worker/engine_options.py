"""EngineOptions: the one carrier of an engine's options, from WorkerSettings to `build_model`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from worker.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine; None leaves the choice to the code that builds it.

    A field that is also a setting has the setting's name; WorkerSettings describes it.
    """

    checkpoint: str  # directory with a Hugging Face checkpoint
    runner: str = "model"  # model, echo
    echo_step_ms: float = 0.0  # duration of a step of the echo runner

    dtype: str = "auto"  # auto, float32, bfloat16, float16
    device: str = "auto"  # auto, cpu, cuda
    load_format: str = "auto"  # auto: safetensors; dummy: random weights for config.json's shapes
    num_threads: int | None = None  # CPU threads; None: `default_threads`
    cpu_tier: str = "auto"  # auto, reference, packed, native; see worker.model.cpu.tiers
    quantization: str = "none"  # none, int8 (CPU only): weights per channel, activations per token
    cpu_weight_copies: str = "auto"  # auto, on, off; see worker.model.cpu.choices

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
    scheduling_policy: str = "fcfs"
    structured_output: bool = True  # where the checkpoint's tokenizer and its end tokens allow it

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
