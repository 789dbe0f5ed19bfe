"""From a checkpoint directory to a runner that is ready for its first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.cores import default_threads
from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.ports import ModelRunner
from worker.engine_options import EngineOptions
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config import ModelConfig
from worker.model.cpu.tiers import Tier, TierRequest, choose_tier, reference_tier
from worker.model.device import available_host_bytes, choose_device, choose_dtype
from worker.model.errors import KVCacheTooSmall, ModelError
from worker.model.kv_cache import KVCachePool, blocks_that_fit
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.linear import Placement
from worker.model.loader import fill_with_noise, load_weights
from worker.model.runner import TorchModelRunner

if TYPE_CHECKING:
    from shared.text.tokenizer import FastTokenizer
    from worker.model.sampling.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

# Shares of what is free after the weights that the KV cache takes by itself.
_HOST_SHARE = 0.5
_HOST_LIMIT_BYTES = 4 << 30
_CUDA_SHARE = 0.9
# Longest step that computes prompts while streams wait for it; see worker.engine.pacer.
# Without lookahead only, as on the CPU.
_STEP_TARGET_MS = 180
# On the CPU a warm-up only shows that a step works; on CUDA it loads the kernels of a full one.
_CPU_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model in memory, and the bounds that its engine must keep."""

    runner: ModelRunner
    engine_config: EngineConfig
    model_config: ModelConfig
    dtype: str  # of weights and KV cache, e.g. "bfloat16"
    num_parameters: int


def build_model(options: EngineOptions, on_progress: Progress | None = None) -> BuiltModel:
    """Loads the weights, sizes and allocates the KV cache, runs one step.

    `on_progress` gets a stage's name and the share of it that is done, 0 to 1. Raises ModelError
    with a sentence that names the option, member or file at fault.
    """
    report = on_progress or (lambda stage, share: None)
    device = choose_device(options.device)
    num_threads = options.num_threads or default_threads()
    torch.set_num_threads(num_threads)
    directory = Path(options.checkpoint)
    config = ModelConfig.from_directory(directory)
    text = _text(directory)
    if text is not None:
        config = replace(config, eos_token_ids=text.eos_token_ids)
    longest = _longest(options, config)
    dtype = choose_dtype(options.dtype, config.dtype, device)
    model = _load(options, config, directory, longest, Placement(device, dtype), report)
    block_size = options.block_size or (32 if device.type == "cuda" else 16)
    tier = _tier(options, config, dtype, block_size, device)
    model.use(tier.ops)
    if tier.has_own_threads:
        torch.set_num_threads(1)  # what is left to torch in a step is little, and its threads spin
    report("allocating KV cache", 0.0)
    num_blocks = _num_blocks(options, model, block_size, longest)
    pool = KVCachePool(config, num_blocks, block_size, device=device, dtype=dtype)
    report("allocating KV cache", 1.0)
    grammar_masks = _grammar_masks(text, config, device) if options.structured_output else None
    runner = TorchModelRunner(
        model,
        tier.stack(model, pool),
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        grammar_masks=grammar_masks,
        sampler_threads=num_threads if tier.has_own_threads else 1,
    )
    engine_config = options.engine_config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=min(longest, num_blocks * block_size),
        default_lookahead=1 if device.type == "cuda" else 0,
        default_step_target_ms=_STEP_TARGET_MS,
        eos_token_ids=config.eos_token_ids,
        structured_output=grammar_masks is not None,
    )
    _warm_up(runner, engine_config, device, report)
    built = BuiltModel(
        runner=runner,
        engine_config=engine_config,
        model_config=config,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
    )
    _log_ready(built, options, tier, device)
    return built


def _log_ready(built: BuiltModel, options: EngineOptions, tier: Tier, device: torch.device) -> None:
    logger.info(
        "model ready: device=%s dtype=%s tier=%s quantization=%s parameters=%d "
        "kv_capacity_tokens=%d structured_output=%s",
        device,
        built.dtype,
        tier.name,
        options.quantization,
        built.num_parameters,
        built.engine_config.capacity_tokens,
        built.engine_config.structured_output,
    )


def _longest(options: EngineOptions, config: ModelConfig) -> int:
    """Returns the prompt and output tokens that a sequence may have. Raises ModelError."""
    if options.max_model_len is None:
        return config.context_length
    if options.max_model_len > config.context_length:
        raise ModelError(
            f"max_model_len {options.max_model_len} is more than the model's "
            f"{config.context_length} positions: MAX_MODEL_LEN may be at most that"
        )
    return options.max_model_len


def _tier(
    options: EngineOptions,
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
        weight_copies=options.cpu_weight_copies,
        memory_share=options.memory_share,
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


@dataclass(frozen=True, slots=True)
class _Text:
    """What the checkpoint's text files give the engine."""

    tokenizer: FastTokenizer
    eos_token_ids: frozenset[int]


def _text(directory: Path) -> _Text | None:
    """Returns None, and logs why, where the text files cannot be read: then there is no structured
    output, and the tokens that end a sequence are those of the configuration."""
    # Here and not above: a machine that only computes, to be tested, lacks their packages.
    try:
        from shared.text.base import TextInvalid
        from shared.text.checkpoint_text import load_tokenizer_and_eos
    except ImportError as error:
        logger.warning("no tokenizer: %s", error)
        return None
    try:
        tokenizer, eos_token_ids = load_tokenizer_and_eos(directory)
    except TextInvalid as error:
        logger.warning("no tokenizer: %s", error)
        return None
    return _Text(tokenizer, frozenset(eos_token_ids))


def _grammar_masks(
    text: _Text | None, config: ModelConfig, device: torch.device
) -> GrammarMasks | None:
    """Returns None, and logs why, where no output can be kept to a grammar."""
    if text is None:
        return None
    try:
        from shared.text.base import GrammarInvalid, TextInvalid
        from shared.text.grammar_compiler import GrammarCompiler
        from worker.model.sampling.grammar_masks import GrammarMasks
    except ImportError as error:
        logger.warning("no structured output: %s", error)
        return None
    try:
        compiler = GrammarCompiler(text.tokenizer, config.vocab_size, sorted(config.eos_token_ids))
        return GrammarMasks(compiler, config.eos_token_ids, device)
    except (TextInvalid, GrammarInvalid) as error:
        logger.warning("no structured output: %s", error)
        return None


def _load(
    options: EngineOptions,
    config: ModelConfig,
    directory: Path,
    max_model_len: int,
    placement: Placement,
    report: Progress,
) -> CausalLM:
    report("loading weights", 0.0)
    try:
        model = CausalLM(config, max_model_len, placement)
        if options.load_format == "dummy":
            fill_with_noise(model)
            report("loading weights", 1.0)
        else:
            load_weights(model, directory, lambda share: report("loading weights", share))
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the weights do not fit in the memory of {placement.device}") from error
    return model


def _num_blocks(options: EngineOptions, model: CausalLM, block_size: int, longest: int) -> int:
    """Returns the blocks of the pool: by the options, or by the free memory.

    Without options it takes at most what all running sequences could fill twice; the second half
    serves the prefix cache. Raises KVCacheTooSmall.
    """
    config, dtype = model.config, model.placement.dtype
    per_sequence = -(-longest // block_size)
    if options.num_kv_blocks is not None:
        num_blocks = options.num_kv_blocks
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
            f"max_model_len is {options.max_model_len}"
        )
    return num_blocks


def _free_bytes(options: EngineOptions, model: CausalLM, block_size: int, longest: int) -> int:
    """Returns the bytes that the KV cache may take beside weights and the largest activations."""
    device = model.placement.device
    if device.type != "cuda":
        free = available_host_bytes() * options.memory_share
        return min(int(free * _HOST_SHARE), _HOST_LIMIT_BYTES)
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
        LayerByLayer(model, SdpaAttention(pool, model.config.layer_scores)),
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
    return max(0, int(free * options.memory_share * _CUDA_SHARE) - peak - logits)


def _warm_up(
    runner: TorchModelRunner, config: EngineConfig, device: torch.device, report: Progress
) -> None:
    report("warming up", 0.0)
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
    if device.type != "cuda":
        num_tokens = min(num_tokens, _CPU_WARM_UP_TOKENS)
    _run_prefill(runner, config.block_size, num_tokens)
    report("warming up", 1.0)


def _run_prefill(runner: TorchModelRunner, block_size: int, num_tokens: int) -> None:
    """Runs one step over blocks that no sequence owns; its keys and values are never read."""
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
