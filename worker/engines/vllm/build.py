"""From EngineOptions to a VllmEngine that is ready for its first step."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.collector import resting
from shared.text.checkpoint_text import load_tokenizer_and_eos
from worker.engine.config import EngineConfig
from worker.engine.interface import BuiltEngine, Progress
from worker.engine_options import EngineOptions
from worker.engines.vllm import loading
from worker.engines.vllm.load_errors import LoadInterrupted, capture_load_errors, load_failure
from worker.engines.vllm.options import (
    check_types,
    check_version,
    choose_device,
    engine_args,
    num_ranks,
    parse_vllm_args,
    set_environment,
    share_threads,
    uses_own_sampler,
)
from worker.engines.vllm.vllm_compat import check_vllm, drop_own_stat_loggers
from worker.lora import check_fits, read_adapters
from worker.model.device import available_host_bytes
from worker.model.errors import KVCacheTooSmall, ModelError

if TYPE_CHECKING:
    from torch.nn import Module
    from vllm import LLMEngine

    from worker.engines.vllm.stats import StatsReader

log = logging.getLogger(__name__)


def build_vllm_engine(
    options: EngineOptions, report: Progress, on_rank_end: Callable[[str], None]
) -> BuiltEngine:
    """Loads the model into vLLM.

    `on_rank_end` gets a sentence, in a thread, when a child of vLLM's with a part of the model has
    ended. Raises ModelError or ValueError with a sentence; LoadInterrupted for a fault that may
    pass.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "PENSTOCK_ENGINE=vllm needs vLLM in the interpreter that PENSTOCK_ENGINE_PYTHON names"
        )
    adapters = read_adapters(options.lora_modules)
    for adapter in adapters.values():
        check_fits(adapter, Path(options.checkpoint))
    report(loading.IMPORTING, 0.0)
    given = parse_vllm_args(options.vllm_args)
    set_environment(given)
    choose_device(options, given)
    loading.log_records(logging.getLogger().level)
    with resting():
        import vllm
        from vllm import EngineArgs
        from vllm.platforms import current_platform

    if not check_version(vllm.__version__):
        log.warning("this release of vLLM is not tested", extra={"vllm": vllm.__version__})
    check_vllm(vllm.__version__)
    # After the check: another release may lack what these import.
    from worker.engines.vllm.adapters import add_adapters
    from worker.engines.vllm.engine import VllmEngine
    from worker.engines.vllm.grammars import bound_grammars
    from worker.engines.vllm.stats import StatsReader

    report(loading.IMPORTING, 1.0)
    check_types(given, {field.name: field.type for field in dataclasses.fields(EngineArgs)})
    args = engine_args(
        options, device=current_platform.device_type, free_bytes=available_host_bytes()
    )
    share_threads(num_ranks(options, given))
    stats = StatsReader()
    report(loading.WEIGHTS, 0.0)  # vLLM's child processes load them without a report
    with loading.progress(report) as records:
        llm = _load(args, stats, records)
    watch_children(on_rank_end)
    drop_own_stat_loggers(llm)
    exact = uses_own_sampler(options, given)
    if not exact:
        bound_grammars()
    config = replace(_config(llm, options, exact), adapters=tuple(adapters))
    model = llm.vllm_config.model_config
    _log_ready(llm, config, exact)
    engine = VllmEngine(
        llm,
        config,
        model.get_vocab_size(),
        stats,
        own_sampler=exact,
        adapters=add_adapters(llm, adapters),
    )
    engine.warm_up(lambda share: report(loading.FIRST_USE, share))
    return BuiltEngine(
        engine=engine,
        config=config,
        vocab_size=model.get_vocab_size(),
        num_parameters=_num_parameters(llm),
        dtype=str(model.dtype).removeprefix("torch."),
        version=vllm.__version__,
        exact_resume=exact
        and (
            # On GPUs a row's bits depend on its batch otherwise.
            current_platform.device_type == "cpu"
            or os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
        ),
        device=current_platform.device_type,
    )


def _load(args: Mapping[str, Any], stats: StatsReader, records: loading.Records) -> LLMEngine:
    with resting():
        from vllm import EngineArgs, LLMEngine

    try:
        with capture_load_errors():
            return LLMEngine.from_engine_args(EngineArgs(**args), stat_loggers=[stats.logger])
    except (ModelError, LoadInterrupted):
        raise
    except Exception as error:
        failure = load_failure(error, records.missing_module)
        if failure is None:
            raise
        raise failure from error


def _config(llm: LLMEngine, options: EngineOptions, exact: bool) -> EngineConfig:
    model, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    num_blocks = (cache.num_gpu_blocks or 1) - 1  # the null block holds nothing
    if num_blocks < 1:
        raise ModelError("this model generates no text: vLLM allocates no KV cache for it")
    # If layers keep other spans of a sequence, a block is not block_size of its tokens.
    capacity = cache.kv_cache_size_tokens or num_blocks * cache.block_size
    capacity = min(capacity, num_blocks * cache.block_size)
    if options.max_model_len is not None and capacity < options.max_model_len:
        raise KVCacheTooSmall(
            f"the KV cache has {capacity} token places, max_model_len is {options.max_model_len}; "
            "PENSTOCK_KV_CACHE_MEMORY_GB or PENSTOCK_NUM_KV_BLOCKS gives it more"
        )
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=llm.vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=min(model.max_model_len, capacity),
        max_waiting=options.max_waiting,
        prefix_caching=bool(cache.enable_prefix_caching),
        policy=options.scheduling_policy,
        preempts=exact,
        eos_token_ids=frozenset(load_tokenizer_and_eos(options.checkpoint)[1]),
        structured_output=options.structured_output and _keeps_to_grammars(llm, exact),
    )


def _keeps_to_grammars(llm: LLMEngine, exact: bool) -> bool:
    """Returns whether outputs can be kept to grammars; vLLM's own sampler needs a tokenizer."""
    from worker.engines.vllm.sampler import keeps_to_grammars

    return all(llm.collective_rpc(keeps_to_grammars)) if exact else llm.tokenizer is not None


def _num_parameters(llm: LLMEngine) -> int:
    """Returns the parameters of the model; 0 if its parts are in other processes."""
    if llm.vllm_config.parallel_config.world_size > 1:
        return 0
    (number,) = llm.apply_model(_count)
    return int(number)


def _count(model: Module) -> int:
    # A function of this module, and no lambda: to a child process it goes by its name.
    return sum(parameter.numel() for parameter in model.parameters())


def _log_ready(llm: LLMEngine, config: EngineConfig, exact: bool) -> None:
    import vllm

    settings = llm.vllm_config
    log.info(
        "vLLM is ready",
        extra={
            "vllm": vllm.__version__,
            "architecture": settings.model_config.architecture,
            "device": settings.device_config.device_type,
            "dtype": str(settings.model_config.dtype).removeprefix("torch."),
            "quantization": settings.model_config.quantization or "none",
            "sampler": "penstock" if exact else "vllm",
            "kv_capacity_tokens": config.capacity_tokens,
            "tensor_parallel_size": settings.parallel_config.tensor_parallel_size,
        },
    )


def watch_children(on_end: Callable[[str], None]) -> None:
    """Calls `on_end` with a sentence, in a thread, when the first of vLLM's children has ended.

    vLLM itself notices it in its next step. Call it when the model is loaded.
    """
    children = multiprocessing.active_children()
    if not children:
        return

    def watch() -> None:
        ended = wait([child.sentinel for child in children])
        child = next(child for child in children if child.sentinel in ended)
        child.join()
        if threading.main_thread().is_alive():  # else this process ends, and ends them
            on_end(f"{child.name}, process {child.pid}, ended with status {child.exitcode}")

    threading.Thread(target=watch, name="children of vLLM", daemon=True).start()
