"""Divides a model over ranks: the possible sizes, and the options and config of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.engine_options import EngineOptions
from worker.model.config.model_config import ModelConfig
from worker.model.device import choose_dtypes
from worker.model.errors import UnsupportedModel
from worker.model.parallel.group import Placement, RankGroup
from worker.model.parallel.processes import rank_threads


def rank_config(config: ModelConfig, group: RankGroup) -> ModelConfig:
    """Returns the config of what a rank computes and caches: its heads and inner features."""
    return replace(
        config,
        num_heads=group.heads(config.num_heads).size,
        num_kv_heads=group.kv_heads(config.num_kv_heads).size,
        intermediate_size=group.features(config.intermediate_size).size,
    )


def rank_part(
    options: EngineOptions, stored_dtype: str, device: torch.device, group: RankGroup
) -> tuple[EngineOptions, Placement]:
    """Returns the options of one rank, and where its parameters are."""
    dtype, kv_dtype = choose_dtypes(options.dtype, options.kv_cache_dtype, stored_dtype, device)
    return _rank_options(options, group, device), Placement(device, dtype, group, kv_dtype)


def _rank_options(options: EngineOptions, group: RankGroup, device: torch.device) -> EngineOptions:
    """Returns the options of one rank: its part of the engine's threads, at least one, and of its
    memory. CUDA devices have memory of their own."""
    if group.size == 1:
        return options
    memory_gb = options.kv_cache_memory_gb
    is_cuda = device.type == "cuda"
    return replace(
        options,
        num_threads=rank_threads(options, group.rank),
        kv_cache_memory_gb=memory_gb / group.size if memory_gb is not None else None,
        kv_offloading_gb=options.kv_offloading_gb / group.size,
        memory_share=options.memory_share / (1 if is_cuda else group.size),
    )


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raises UnsupportedModel, naming the sizes that would do, where `size` does not divide it."""
    if divides(config, size):
        return
    possible = [str(n) for n in range(1, config.num_heads + 1) if divides(config, n)]
    raise UnsupportedModel(
        f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} does not divide the model: config.json has "
        f"num_attention_heads {config.num_heads}, num_key_value_heads {config.num_kv_heads} and "
        f"intermediate_size {config.intermediate_size}; possible sizes: {', '.join(possible)}"
    )


def divides(config: ModelConfig, size: int) -> bool:
    """Returns whether `size` ranks can each have as many heads and inner features as the others."""
    kv_heads = config.num_kv_heads
    return (
        config.num_heads % size == 0
        and config.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    )
