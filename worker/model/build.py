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
from worker.engine_options import (
    CPU_BATCHED_TOKENS,
    CUDA_BATCHED_TOKENS,
    EngineOptions,
    ModelImpl,
)
from worker.model.device import available_host_bytes, choose_device, choose_dtype
from worker.model.errors import KVCacheTooSmall, ModelError, UnsupportedModel
from worker.model.kv_cache import KVCachePool, blocks_that_fit
from worker.model.layers.linear import Placement
from worker.model.native import NativeSource
from worker.model.parallel.forward import RankForward
from worker.model.parallel.group import ALONE, RankGroup
from worker.model.parallel.joining import rank_device
from worker.model.parallel.plan import rank_options
from worker.model.runner import TorchModelRunner
from worker.model.served import (
    BuiltStack,
    CapturingStack,
    ModelSource,
    OtherRanks,
    Progress,
    ServedConfig,
)

if TYPE_CHECKING:
    from shared.text.tokenizer import FastTokenizer
    from worker.model.layers.decoder import DecoderStack
    from worker.model.parallel.processes import RankProcesses
    from worker.model.sampling.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

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
    model_config: ServedConfig
    dtype: str  # of weights and KV cache, e.g. "bfloat16"
    num_parameters: int
    close: Callable[[], None]  # ends the other ranks; at the latest the end of this process does


def build_model(
    options: EngineOptions,
    on_progress: Progress | None = None,
    on_rank_end: Callable[[str], None] | None = None,
    processes: RankProcesses | None = None,
) -> BuiltModel:
    """Loads the weights, sizes and allocates the KV cache, runs one step.

    `on_progress` gets a stage's name and the share of it that is done, 0 to 1. `on_rank_end` gets a
    sentence, in any thread, when another rank has ended, and is to end this process. `processes`
    are the other ranks' where they have been started; without a model they end with this process.
    Raises ModelError with a sentence that names the option, member or file at fault.
    """
    report = on_progress or (lambda stage, share: None)
    device = choose_device(options.device)
    directory = Path(options.checkpoint)
    source = choose_source(options.model_impl, directory)
    text = _text(directory)
    if text is not None:
        source.end_sequences_with(text.eos_token_ids)
    if options.tensor_parallel_size == 1:
        part = load_part(options, source, device, ALONE, report)
        return complete(options, source, part, text, None, report)
    source.check_divisible(options.tensor_parallel_size)
    # Here and not above: it starts processes, which a model in one process does not need.
    from worker.model.parallel.ranks import start_ranks

    ranks = start_ranks(options, device, processes, on_rank_end)
    try:
        report("starting ranks", 0.0)
        group = ranks.join(rank_device(device, 0))
        report("starting ranks", 1.0)
        part = load_part(options, source, device, group, ranks.watched(report))
        ranks.loaded()
        return complete(options, source, part, text, ranks, report)
    except Exception as error:
        ranks.explain(error)
        raise


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """A rank's part of a model, over its KV cache."""

    built: BuiltStack
    stack: DecoderStack
    longest: int  # prompt and output tokens of a sequence
    num_blocks: int
    block_size: int
    lookahead: int
    num_threads: int


def load_part(
    options: EngineOptions,
    source: ModelSource,
    device: torch.device,
    group: RankGroup,
    report: Progress,
) -> LoadedPart:
    """Loads what this rank has of the model, sizes and allocates its KV cache.

    All ranks call it together. Raises ModelError.
    """
    options = rank_options(options, group, device)
    num_threads = options.num_threads or default_threads()
    torch.set_num_threads(num_threads)
    longest = _longest(options, source.config)
    dtype = choose_dtype(options.dtype, source.config.dtype, device)
    block_size = options.block_size or (32 if device.type == "cuda" else 16)
    built = source.load(
        options,
        Placement(device, dtype, group),
        longest,
        block_size,
        report,
    )
    if built.has_own_threads:
        torch.set_num_threads(1)  # what is left to torch in a step is little, and its threads spin
    report("allocating KV cache", 0.0)
    num_blocks = group.least(_num_blocks(options, built, block_size, longest), device)
    pool = KVCachePool(built.keeps, num_blocks, block_size, device=device, dtype=dtype)
    report("allocating KV cache", 1.0)
    lookahead = options.lookahead
    return LoadedPart(
        built=built,
        stack=built.stack(pool),
        longest=longest,
        num_blocks=num_blocks,
        block_size=block_size,
        lookahead=(1 if device.type == "cuda" else 0) if lookahead is None else lookahead,
        num_threads=num_threads,
    )


def complete(
    options: EngineOptions,
    source: ModelSource,
    part: LoadedPart,
    text: _Text | None,
    ranks: OtherRanks | None,
    report: Progress,
) -> BuiltModel:
    """Returns the model with its runner, after a first step. `ranks` have its other parts."""
    config, model = source.config, part.built.model
    device = model.placement.device
    grammar_masks = _grammar_masks(text, config, device) if options.structured_output else None
    runner = TorchModelRunner(
        model,
        part.stack,
        block_size=part.block_size,
        max_num_seqs=options.max_num_seqs,
        grammar_masks=grammar_masks,
        sampler_threads=part.num_threads if part.built.has_own_threads else 1,
        ranks=ranks,
        shares_tokens=ranks is not None and part.lookahead > 0,
    )
    engine_config = options.engine_config(
        num_blocks=part.num_blocks,
        block_size=part.block_size,
        max_model_len=min(part.longest, part.num_blocks * part.block_size),
        default_lookahead=part.lookahead,
        default_step_target_ms=_STEP_TARGET_MS,
        default_num_batched_tokens=_num_batched_tokens(options, device),
        eos_token_ids=config.eos_token_ids,
        structured_output=grammar_masks is not None,
    )
    _warm_up(runner, engine_config, device, report)
    if isinstance(part.stack, CapturingStack):
        part.stack.capture(lambda share: report("capturing CUDA graphs", share))
    built = BuiltModel(
        runner=runner,
        engine_config=engine_config,
        model_config=config,
        dtype=str(model.placement.dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
        close=ranks.close if ranks is not None else lambda: None,
    )
    _log_ready(built, options, source.name, part.built.tier, device)
    return built


def _num_batched_tokens(options: EngineOptions, device: torch.device) -> int:
    default = CUDA_BATCHED_TOKENS if device.type == "cuda" else CPU_BATCHED_TOKENS
    return options.max_num_batched_tokens or default


def choose_source(implementation: ModelImpl, directory: Path) -> ModelSource:
    """Returns how the checkpoint's model is made: as a native family, or by transformers.

    "auto" takes a native family where there is one. Raises ModelError naming what is at fault.
    """
    if implementation != "transformers":
        try:
            return NativeSource(directory)
        except UnsupportedModel as error:
            if implementation == "native":
                raise UnsupportedModel(
                    f"{error}; PENSTOCK_MODEL_IMPL=auto leaves it to transformers, "
                    "PENSTOCK_ENGINE=vllm may serve it"
                ) from error
            not_native = error
    try:
        # Here and not above: it takes seconds, and native families do not need it.
        from worker.model.transformers.source import TransformersSource
    except ImportError as error:
        raise UnsupportedModel(
            f"model_impl 'transformers' needs the package transformers: {error}"
            if implementation == "transformers"
            else f"{not_native}; transformers may have it, but cannot be imported: {error}"
        ) from error
    if implementation == "auto":
        logger.info("no native family (%s): transformers computes the model", not_native)
    return TransformersSource(directory)


def _log_ready(
    built: BuiltModel, options: EngineOptions, implementation: str, tier: str, device: torch.device
) -> None:
    logger.info(
        "model ready: implementation=%s device=%s dtype=%s tier=%s quantization=%s parameters=%d "
        "kv_capacity_tokens=%d structured_output=%s",
        implementation,
        device,
        built.dtype,
        tier,
        options.quantization,
        built.num_parameters,
        built.engine_config.capacity_tokens,
        built.engine_config.structured_output,
    )


def _longest(options: EngineOptions, config: ServedConfig) -> int:
    """Returns the prompt and output tokens that a sequence may have. Raises ModelError."""
    if options.max_model_len is None:
        return config.context_length
    if options.max_model_len > config.context_length:
        raise ModelError(
            f"max_model_len {options.max_model_len} is more than the model's "
            f"{config.context_length} positions: PENSTOCK_MAX_MODEL_LEN may be at most that"
        )
    return options.max_model_len


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
    text: _Text | None, config: ServedConfig, device: torch.device
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


def _num_blocks(options: EngineOptions, built: BuiltStack, block_size: int, longest: int) -> int:
    """Returns the blocks of the pool: by the options, or by the free memory.

    Without options it takes at most what all running sequences could fill twice; the second half
    serves the prefix cache. Raises KVCacheTooSmall.
    """
    keeps, placement = built.keeps, built.model.placement
    per_sequence = -(-longest // block_size)
    if options.num_kv_blocks is not None:
        num_blocks = options.num_kv_blocks
    elif options.kv_cache_memory_gb is not None:
        memory = int(options.kv_cache_memory_gb * 2**30)
        num_blocks = blocks_that_fit(memory, keeps, block_size, placement.dtype)
    else:
        memory = _free_bytes(options, built, block_size, longest)
        num_blocks = blocks_that_fit(memory, keeps, block_size, placement.dtype)
        num_blocks = min(num_blocks, 2 * options.max_num_seqs * per_sequence)
    if options.max_model_len is not None and num_blocks < per_sequence:
        raise KVCacheTooSmall(
            f"the KV cache has {num_blocks * block_size} token places, "
            f"max_model_len is {options.max_model_len}; "
            "PENSTOCK_KV_CACHE_MEMORY_GB or PENSTOCK_NUM_KV_BLOCKS gives it more"
        )
    return num_blocks


def _free_bytes(options: EngineOptions, built: BuiltStack, block_size: int, longest: int) -> int:
    """Returns the bytes that this rank's KV cache may take beside its weights and the largest
    activations."""
    model, device = built.model, built.model.placement.device
    if device.type != "cuda":
        free = available_host_bytes() * options.memory_share
        limit = _HOST_LIMIT_BYTES // model.placement.group.size
        return min(int(free * _HOST_SHARE), limit)
    num_tokens = min(_num_batched_tokens(options, device), longest)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pool = KVCachePool(
        built.keeps,
        -(-num_tokens // block_size),
        block_size,
        device=device,
        dtype=model.placement.dtype,
    )
    stack = built.stack(pool)
    if model.placement.group.rank == 0:
        runner = TorchModelRunner(
            model, stack, block_size=block_size, max_num_seqs=options.max_num_seqs
        )
        _run_prefill(runner, block_size, num_tokens)
        del runner
    else:
        forward = RankForward(model, stack, block_size=block_size, shares_tokens=False)
        forward.run(ScheduledBatch((_prefill(block_size, num_tokens),)))
        del forward
    peak = torch.cuda.max_memory_allocated(device) - before
    captured = _captured_bytes(stack, device)
    # Every row's logits in float32, several times over while they are sampled from.
    logits = 8 * 4 * options.max_num_seqs * model.config.vocab_size
    del pool, stack
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free * options.memory_share * _CUDA_SHARE) - peak - logits - captured)


def _captured_bytes(stack: DecoderStack, device: torch.device) -> int:
    """Returns the memory that the stack's CUDA graphs take."""
    if not isinstance(stack, CapturingStack):
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    stack.capture(lambda share: None, largest_only=True)
    return max(0, free - torch.cuda.mem_get_info(device)[0])


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
    runner.launch(ScheduledBatch((_prefill(block_size, num_tokens),))).collect()
    runner.launch(ScheduledBatch((), (-1,))).collect()


def _prefill(block_size: int, num_tokens: int) -> ScheduledSequence:
    tokens = [0] * num_tokens
    return ScheduledSequence(
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
