"""From a checkpoint directory to a runner that is ready for its first step."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from shared.cores import default_threads
from shared.cpu_time import TenantSeconds
from worker.engine.config import EngineConfig
from worker.engine.ports import ModelRunner
from worker.engine_options import (
    EngineOptions,
    ModelImpl,
)
from worker.model.device import choose_device
from worker.model.errors import ModelError, UnsupportedModel
from worker.model.kv_disk import DiskBlocks, fingerprint
from worker.model.kv_offload import HostBlocks
from worker.model.native import NativeSource
from worker.model.parallel.group import ALONE, RankGroup
from worker.model.parallel.plan import rank_part
from worker.model.served import (
    BuiltStack,
    ModelSource,
    OtherRanks,
    Progress,
    ServedConfig,
)
from worker.model.step.kv_sizing import KVCache, allocate_kv_cache
from worker.model.step.runner import TorchModelRunner
from worker.model.step.warm_up import warm_up

if TYPE_CHECKING:
    from shared.text.tokenizer import FastTokenizer
    from worker.model.parallel.processes import RankProcesses
    from worker.model.sampling.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

# Longest step that computes prompts while streams wait for it; see worker.engine.pacer.
_STEP_TARGET_MS = 180
_TRANSFORMERS = "worker.engines.transformers.source"
# Folders of what computes keys and values.
_WORKER = Path(__file__).parents[1]
_SOURCES = (_WORKER / "model", _WORKER / "engines" / "transformers")


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model in memory, and the bounds that its engine must keep."""

    runner: ModelRunner
    engine_config: EngineConfig
    model_config: ServedConfig
    device: str  # cpu or cuda
    dtype: str  # of the model, e.g. "bfloat16"
    num_parameters: int
    close: Callable[[], None]  # ends other ranks and writes; the end of this process does, too
    exact_resume: bool  # see resumes_exactly
    mask_times: TenantSeconds | None = None
    disk: DiskBlocks | None = None  # for its Engine


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
    text = _text(directory)
    eos_token_ids = None if text is None else text.eos_token_ids
    source = choose_source(options.model_impl, directory, eos_token_ids)
    if options.quantization == "fp8" and (source.name != "native" or device.type != "cuda"):
        raise ModelError(
            f"quantization 'fp8' is for native model families on CUDA: this model is served by the "
            f"{source.name} implementation on {device}"
        )
    if options.batch_invariant and device.type == "cuda":
        _check_invariant(options, source)
    with ThreadPoolExecutor(1, "masks of the vocabulary") as thread:  # while weights are read
        masks = None
        if options.structured_output:
            masks = thread.submit(_grammar_masks, text, source.config, device)
        if options.tensor_parallel_size == 1:
            part = load_part(options, source, device, ALONE, report)
            return complete(options, source, part, masks, None, report)
        source.check_divisible(options.tensor_parallel_size)
        # Not above: it starts processes, which a model in one process does not need.
        from worker.model.parallel.ranks import start_ranks

        ranks = start_ranks(options, device, processes, on_rank_end, report)
        try:
            part = load_part(options, source, device, ranks.group, ranks.report)
            ranks.loaded()
            return complete(options, source, part, masks, ranks, report)
        except Exception as error:
            ranks.explain(error)
            raise


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """A rank's part of a model, over its KV cache."""

    built: BuiltStack
    kv_cache: KVCache
    longest: int  # prompt and output tokens of a sequence
    lookahead: int
    num_threads: int


def load_part(
    options: EngineOptions,
    source: ModelSource,
    device: torch.device,
    group: RankGroup,
    report: Progress,
) -> LoadedPart:
    """Loads this rank's part of the model, sizes and allocates its KV cache.

    All ranks call it together. Raises ModelError.
    """
    options, placement = rank_part(options, source.config.dtype, device, group)
    num_threads = options.num_threads or default_threads()
    torch.set_num_threads(num_threads)
    longest = _longest(options, source.config)
    is_cuda = device.type == "cuda"
    block_size = options.block_size or (32 if is_cuda else 16)
    built = source.load(options, placement, longest, block_size, report)
    if built.has_own_threads:
        torch.set_num_threads(1)  # torch has little left to do in a step, and its threads spin
    lookahead = options.lookahead
    return LoadedPart(
        built=built,
        kv_cache=allocate_kv_cache(options, built, block_size, longest, report),
        longest=longest,
        lookahead=int(is_cuda) if lookahead is None else lookahead,
        num_threads=num_threads,
    )


def complete(
    options: EngineOptions,
    source: ModelSource,
    part: LoadedPart,
    masks: Future[GrammarMasks | None] | None,
    ranks: OtherRanks | None,
    report: Progress,
) -> BuiltModel:
    """Returns the model with its runner, after a first step. `ranks` have its other parts."""
    config, model, kv_cache = source.config, part.built.model, part.kv_cache
    device = model.placement.device
    grammar_masks = None if masks is None else masks.result()
    runner = TorchModelRunner(
        model,
        kv_cache.stack,
        block_size=kv_cache.block_size,
        max_num_seqs=options.max_num_seqs,
        grammar_masks=grammar_masks,
        sampler_threads=part.num_threads if part.built.has_own_threads else 1,
        ranks=ranks,
        shares_tokens=ranks is not None and part.lookahead > 0,
        num_kv_groups=len(kv_cache.windows),
        host_blocks=kv_cache.host_blocks,
    )
    engine_config = options.engine_config(
        num_blocks=kv_cache.num_blocks,
        block_size=kv_cache.block_size,
        max_model_len=part.longest,
        default_lookahead=part.lookahead,
        default_step_target_ms=_STEP_TARGET_MS,
        is_cuda=device.type == "cuda",
        eos_token_ids=config.eos_token_ids,
        structured_output=grammar_masks is not None,
        windows=kv_cache.windows,
    )
    longest = min(part.longest, engine_config.sequence_capacity_tokens)
    engine_config = replace(engine_config, max_model_len=longest)
    if kv_cache.host_blocks is not None:
        engine_config = replace(
            engine_config,
            num_offload_blocks=len(kv_cache.host_blocks.slots),
            offload_stores_per_step=kv_cache.host_blocks.stores_per_step,
        )
    warm_up(runner, engine_config, device, report)
    disk = None
    if options.kv_offloading_dir and kv_cache.host_blocks is not None:
        disk = _disk_blocks(options, source, part, kv_cache.host_blocks)
    built = BuiltModel(
        runner=runner,
        engine_config=engine_config,
        model_config=config,
        device=device.type,
        dtype=str(model.placement.dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
        close=ranks.close if ranks is not None else disk.close if disk is not None else _nothing,
        exact_resume=resumes_exactly(options, device),
        disk=disk,
        mask_times=grammar_masks.times if grammar_masks is not None else None,
    )
    _log_ready(built, options, source.name, part.built.tier, device)
    return built


def _nothing() -> None:
    """Closes a model that has no other processes and no files."""


def _disk_blocks(
    options: EngineOptions, source: ModelSource, part: LoadedPart, host_blocks: HostBlocks
) -> DiskBlocks:
    """Raises ModelError where the directory cannot be used."""
    built = part.built
    model = fingerprint(
        Path(options.checkpoint),
        _SOURCES,
        {
            "torch": torch.__version__,
            "transformers": version("transformers") if source.name == "transformers" else None,
            "implementation": source.name,
            "tier": built.tier,
            "device": _processor(built.model.placement.device),
            "batch_invariant": options.batch_invariant,
            "dtypes": (str(built.model.placement.dtype), str(built.kv_dtype)),
            "quantization": options.quantization,
            "load_format": options.load_format,
            "attention": options.attention_backend,
            "block_size": part.kv_cache.block_size,
            "layers": [astuple(layer) for layer in built.keeps.kv_layers],
        },
    )
    max_bytes = int(options.kv_offloading_dir_gb * 2**30)
    return DiskBlocks(Path(options.kv_offloading_dir), model, host_blocks.slots, max_bytes)


def _processor(device: torch.device) -> tuple[object, ...]:
    """Returns on which the last bits of a product depend."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name, torch.cuda.get_device_capability
        return (name(device), capability(device))
    return (device.type, torch.backends.cpu.get_cpu_capability())


def choose_source(
    implementation: ModelImpl, directory: Path, eos_token_ids: frozenset[int] | None = None
) -> ModelSource:
    """Returns how the checkpoint's model is made: as a native family, or by transformers.

    `eos_token_ids` end a sequence; None: those of the checkpoint's configuration.
    "auto" takes a native family where there is one. Raises ModelError naming the member at fault.
    """
    if implementation != "transformers":
        try:
            return NativeSource(directory, eos_token_ids)
        except UnsupportedModel as error:
            if implementation == "native":
                raise UnsupportedModel(
                    f"{error}; set PENSTOCK_MODEL_IMPL=auto to serve it through transformers, "
                    "or try PENSTOCK_ENGINE=vllm"
                ) from error
            not_native = error
    try:
        # By name, when it is needed: importing transformers takes seconds, and it stands above.
        source = importlib.import_module(_TRANSFORMERS).TransformersSource
    except ImportError as error:
        raise UnsupportedModel(
            f"model_impl 'transformers' needs the package transformers: {error}"
            if implementation == "transformers"
            else f"{not_native}; transformers may support it, but cannot be imported: {error}"
        ) from error
    if implementation == "auto":
        logger.info("serving the model through transformers: %s", not_native)
    return cast(ModelSource, source(directory, eos_token_ids))


def resumes_exactly(options: EngineOptions, device: torch.device) -> bool:
    """Returns whether an output that was cut continues with the tokens that it would have had.

    It is computed as a prompt then, and among others. On CPUs tests compare the tokens; on GPUs the
    last bits of a product depend on its number of rows unless the options forbid it.
    """
    return device.type != "cuda" or options.batch_invariant


def _check_invariant(options: EngineOptions, source: ModelSource) -> None:
    """Raises ModelError where a CUDA device cannot compute rows by themselves."""
    reason = None
    if source.name != "native":
        reason = f"this model is computed by {source.name}"
    elif options.tensor_parallel_size > 1:
        reason = f"PENSTOCK_TENSOR_PARALLEL_SIZE is {options.tensor_parallel_size}"
    if reason is not None:
        raise ModelError(
            f"PENSTOCK_BATCH_INVARIANT is for native model families on one GPU, and {reason}"
        )


def _log_ready(
    built: BuiltModel, options: EngineOptions, implementation: str, tier: str, device: torch.device
) -> None:
    logger.info(
        "model ready on %s: %d parameters in %s, quantization %s, %s implementation, tier %s; "
        "the KV cache holds %d tokens, %d of one sequence; structured output is %s",
        device,
        built.num_parameters,
        built.dtype,
        options.quantization,
        implementation,
        tier,
        built.engine_config.capacity_tokens,
        built.engine_config.sequence_capacity_tokens,
        "on" if built.engine_config.structured_output else "off",
    )


def _longest(options: EngineOptions, config: ServedConfig) -> int:
    """Returns the prompt and output tokens that a sequence may have. Raises ModelError."""
    if options.max_model_len is None:
        return config.context_length
    if options.max_model_len > config.context_length:
        raise ModelError(
            f"max_model_len {options.max_model_len} exceeds the model's context of "
            f"{config.context_length} tokens: lower PENSTOCK_MAX_MODEL_LEN"
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
        logger.warning(
            "structured output is off, because the tokenizer cannot be loaded: %s", error
        )
        return None
    try:
        tokenizer, eos_token_ids = load_tokenizer_and_eos(directory)
    except TextInvalid as error:
        logger.warning(
            "structured output is off, because the tokenizer cannot be loaded: %s", error
        )
        return None
    return _Text(tokenizer, frozenset(eos_token_ids))


def _grammar_masks(
    text: _Text | None, config: ServedConfig, device: torch.device
) -> GrammarMasks | None:
    """Returns None, and logs why, where no output can be kept to a grammar."""
    if text is None:
        return None
    try:
        from worker.model.sampling.grammar_masks import grammar_masks
    except ImportError as error:
        logger.warning("structured output is off: %s", error)
        return None
    return grammar_masks(text.tokenizer, config.vocab_size, config.eos_token_ids, device)
