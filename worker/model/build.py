"""From a checkpoint directory to a runner that is ready for its first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.cores import default_threads
from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.ports import ModelRunner
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config import ModelConfig
from worker.model.cpu.tiers import (
    QUANTIZATIONS,
    TIERS,
    WEIGHT_COPIES,
    Tier,
    TierRequest,
    choose_tier,
    reference_tier,
)
from worker.model.device import available_host_bytes, choose_device, choose_dtype
from worker.model.errors import KVCacheTooSmall, ModelError
from worker.model.kv_cache import KVCachePool, blocks_that_fit
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.linear import Placement
from worker.model.loader import fill_with_noise, load_weights
from worker.model.registry import create_model
from worker.model.runner import TorchModelRunner

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

# Shares of what is free after the weights that the KV cache takes by itself.
_HOST_SHARE = 0.5
_HOST_LIMIT_BYTES = 4 << 30
_CUDA_SHARE = 0.9
# Streams wait so long for a step that computes somebody else's prompt; see worker.engine.pacer.
_CPU_STEP_TARGET_MS = 180
# On the CPU a warm-up only shows that a step works; on CUDA it loads the kernels of a full one.
_CPU_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What may be chosen about a model; None leaves the choice to `build_model`."""

    model: str  # a directory with a Hugging Face checkpoint
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    device: str = "auto"  # auto, cpu, cuda
    load_format: str = "auto"  # auto: safetensors; dummy: random weights for config.json's shapes
    block_size: int | None = None  # token places of a KV block
    num_blocks: int | None = None  # goes before kv_cache_memory_gb
    kv_cache_memory_gb: float | None = None  # GiB
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    prefix_caching: bool = True
    lookahead: int | None = None
    step_target_ms: int | None = None  # 0: none; by itself there is one on the CPU only
    num_threads: int | None = None  # on the CPU; by itself what `default_threads` says
    cpu_tier: str = "auto"  # auto, reference, packed, native; see worker.model.cpu.tiers
    quantization: str = "none"  # none, int8 (CPU only): weights per channel, activations per token
    weight_copies: str = "auto"  # auto, on, off; see worker.model.cpu.choices
    structured_output: bool = True  # where the checkpoint's tokenizer and its end tokens allow it


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model in memory, and the bounds that its engine must keep."""

    runner: ModelRunner
    engine_config: EngineConfig
    model_config: ModelConfig
    dtype: str  # of weights and KV as they are in use, e.g. "bfloat16"
    num_parameters: int
    kv_capacity_tokens: int


def build_model(options: ModelOptions, on_progress: Progress | None = None) -> BuiltModel:
    """Loads the weights, sizes and allocates the KV cache, runs one step.

    `on_progress` gets a stage's name and how much of it is done, 0 to 1. Raises ModelError with a
    sentence that names the option, member or file at fault.
    """
    report = on_progress or _report_nothing
    _check(options)
    device = choose_device(options.device)
    num_threads = options.num_threads or default_threads()
    torch.set_num_threads(num_threads)
    directory = Path(options.model)
    config = ModelConfig.from_directory(directory)
    longest = min(options.max_model_len or config.context_length, config.context_length)
    if options.max_model_len is not None and options.max_model_len > config.context_length:
        raise ModelError(
            f"max_model_len {options.max_model_len} is more than the model's "
            f"{config.context_length} positions"
        )
    dtype = choose_dtype(options.dtype, config.dtype, device)
    placement = Placement(device, dtype)
    report("loading weights", 0.0)
    model = _load(options, config, directory, longest, placement, report)
    block_size = options.block_size or (32 if device.type == "cuda" else 16)
    tier = _tier(options, config, dtype, block_size, device)
    model.use(tier.ops)
    if tier.has_own_threads:
        torch.set_num_threads(1)  # what is left to torch in a step is little, and its threads spin
    report("allocating KV cache", 0.0)
    num_blocks = _num_blocks(options, model, block_size, longest)
    pool = KVCachePool(config, num_blocks, block_size, device=device, dtype=dtype)
    capacity = num_blocks * block_size
    report("allocating KV cache", 1.0)
    grammar_masks = _grammar_masks(directory, config, device) if options.structured_output else None
    runner = TorchModelRunner(
        model,
        tier.stack(model, pool),
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        grammar_masks=grammar_masks,
        sampler_threads=num_threads if tier.has_own_threads else 1,
    )
    report("warming up", 0.0)
    num_tokens = min(options.max_num_batched_tokens, longest, capacity)
    if device.type != "cuda":
        num_tokens = min(num_tokens, _CPU_WARM_UP_TOKENS)
    _run_prefill(runner, block_size, num_tokens)
    report("warming up", 1.0)
    engine_config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min(longest, capacity),
        prefix_caching=options.prefix_caching,
        lookahead=_lookahead(options, device),
        step_target_s=_step_target_s(options, device),
        eos_token_ids=config.eos_token_ids,
        structured_output=grammar_masks is not None,
    )
    logger.info(
        "model ready: device=%s dtype=%s tier=%s quantization=%s parameters=%d "
        "kv_capacity_tokens=%d structured_output=%s",
        device,
        dtype,
        tier.name,
        options.quantization,
        model.num_parameters,
        capacity,
        grammar_masks is not None,
    )
    return BuiltModel(
        runner=runner,
        engine_config=engine_config,
        model_config=config,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
        kv_capacity_tokens=capacity,
    )


def _report_nothing(stage: str, share: float) -> None:
    """For callers who do not want to know."""


def _check(options: ModelOptions) -> None:
    for name in (
        "block_size",
        "num_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "num_threads",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ModelError(f"{name} must be at least 1, got {value}")
    if options.kv_cache_memory_gb is not None and options.kv_cache_memory_gb <= 0:
        raise ModelError(f"kv_cache_memory_gb must be positive, got {options.kv_cache_memory_gb}")
    if options.load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format {options.load_format!r} is not known; use auto or dummy")
    if options.cpu_tier not in TIERS:
        raise ModelError(f"cpu_tier {options.cpu_tier!r} is not known; use {', '.join(TIERS)}")
    if options.quantization not in QUANTIZATIONS:
        raise ModelError(
            f"quantization {options.quantization!r} is not known; use {', '.join(QUANTIZATIONS)}"
        )
    if options.weight_copies not in WEIGHT_COPIES:
        raise ModelError(
            f"weight_copies {options.weight_copies!r} is not known; use {', '.join(WEIGHT_COPIES)}"
        )
    if options.lookahead not in (None, 0, 1):
        raise ModelError(f"lookahead must be 0 or 1, got {options.lookahead}")
    if options.step_target_ms is not None and options.step_target_ms < 0:
        raise ModelError(f"step_target_ms must not be negative, got {options.step_target_ms}")


def _tier(
    options: ModelOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
) -> Tier:
    request = TierRequest(
        config=config,
        dtype=dtype,
        block_size=block_size,
        quantization=options.quantization,
        num_threads=options.num_threads or default_threads(),
        weight_copies=options.weight_copies,
    )
    if device.type == "cpu":
        return choose_tier(options.cpu_tier, request)
    for name, value, neutral in (
        ("cpu_tier", options.cpu_tier, "auto"),
        ("quantization", options.quantization, "none"),
    ):
        if value != neutral:
            raise ModelError(f"{name} {value!r} is for the CPU, the device is {device}")
    return reference_tier(request)


def _lookahead(options: ModelOptions, device: torch.device) -> int:
    if options.lookahead is not None:
        return options.lookahead
    return 1 if device.type == "cuda" else 0


def _step_target_s(options: ModelOptions, device: torch.device) -> float | None:
    target_ms = options.step_target_ms
    if target_ms is None:
        target_ms = _CPU_STEP_TARGET_MS if _lookahead(options, device) == 0 else 0
    return target_ms / 1000 if target_ms else None


def _grammar_masks(
    directory: Path, config: ModelConfig, device: torch.device
) -> GrammarMasks | None:
    """None where no output can be kept to a grammar; the log says why."""
    # Here and not above: a machine that only computes, to be tested, lacks their packages.
    try:
        from shared.text.base import GrammarInvalid, TextInvalid
        from shared.text.grammar_compiler import GrammarCompiler
        from shared.text.model_card import load_tokenizer
        from worker.model.sampling.grammar_masks import GrammarMasks
    except ImportError as error:
        logger.warning("no structured output: %s", error)
        return None
    try:
        compiler = GrammarCompiler(
            load_tokenizer(directory), config.vocab_size, sorted(config.eos_token_ids)
        )
        return GrammarMasks(compiler, config.eos_token_ids, device)
    except (TextInvalid, GrammarInvalid) as error:
        logger.warning("no structured output: %s", error)
        return None


def _load(
    options: ModelOptions,
    config: ModelConfig,
    directory: Path,
    max_model_len: int,
    placement: Placement,
    report: Progress,
) -> CausalLM:
    try:
        model = create_model(config, max_model_len, placement)
        if options.load_format == "dummy":
            fill_with_noise(model)
            report("loading weights", 1.0)
        else:
            load_weights(model, directory, lambda share: report("loading weights", share))
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the weights do not fit in the memory of {placement.device}") from error
    return model


def _num_blocks(options: ModelOptions, model: CausalLM, block_size: int, longest: int) -> int:
    """Blocks of the pool: from the options, or what the free memory holds.

    By itself it takes no more than every running sequence could fill twice over; the second half
    serves the prefix cache.
    """
    config, dtype = model.config, model.placement.dtype
    per_sequence = -(-longest // block_size)
    if options.num_blocks is not None:
        num_blocks = options.num_blocks
    elif options.kv_cache_memory_gb is not None:
        memory = int(options.kv_cache_memory_gb * 2**30)
        num_blocks = blocks_that_fit(memory, config, block_size, dtype)
    else:
        memory = _free_bytes(options, model, block_size, longest)
        num_blocks = blocks_that_fit(memory, config, block_size, dtype)
        num_blocks = min(num_blocks, 2 * options.max_num_seqs * per_sequence)
    if options.max_model_len is not None and num_blocks < per_sequence:
        raise KVCacheTooSmall(
            f"the KV cache has {num_blocks * block_size} token places, "
            f"max_model_len asks for {options.max_model_len}"
        )
    return num_blocks


def _free_bytes(options: ModelOptions, model: CausalLM, block_size: int, longest: int) -> int:
    """What the KV cache may take, after the weights and the largest step's activations."""
    device = model.placement.device
    if device.type != "cuda":
        return min(int(available_host_bytes() * _HOST_SHARE), _HOST_LIMIT_BYTES)
    num_tokens = min(options.max_num_batched_tokens, longest)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pool = KVCachePool(
        model.config,
        -(-num_tokens // block_size),
        block_size,
        device=device,
        dtype=model.placement.dtype,
    )
    runner = TorchModelRunner(
        model,
        LayerByLayer(model, SdpaAttention(pool)),
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
    )
    _run_prefill(runner, block_size, num_tokens)
    peak = torch.cuda.max_memory_allocated(device) - before
    # Every row's logits in float32, several times over while they are sampled from.
    logits = 8 * 4 * options.max_num_seqs * model.config.vocab_size
    del pool, runner
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free * _CUDA_SHARE) - peak - logits)


def _run_prefill(runner: TorchModelRunner, block_size: int, num_tokens: int) -> None:
    """One step over blocks that nobody owns yet; what it leaves in them is never read."""
    tokens = [0] * num_tokens
    sequence = ScheduledSequence(
        seq_id=-1,
        start=0,
        num_scheduled_tokens=num_tokens,
        token_ids=tokens,
        block_table=range(-(-num_tokens // block_size)),
        samples=True,
        params=SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=0),
        prompt_token_ids=tokens,
        output_token_ids=(),
    )
    runner.launch(ScheduledBatch((sequence,))).collect()
    runner.launch(ScheduledBatch((), (-1,))).collect()
