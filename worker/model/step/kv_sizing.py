"""Sizes and allocates the KV cache: by the options, or by the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engine.batch import ScheduledBatch
from worker.engine.config import window_blocks
from worker.engine_options import EngineOptions
from worker.model.base import DecoderStack, KVLayer
from worker.model.device import available_host_bytes
from worker.model.errors import KVCacheTooSmall
from worker.model.kv_cache import KVCachePool, block_bytes, blocks_that_fit
from worker.model.kv_offload import HostBlocks
from worker.model.served import BuiltStack, CapturingStack, Progress
from worker.model.step.rank_forward import RankForward
from worker.model.step.runner import TorchModelRunner
from worker.model.step.warm_up import prefill, run_prefill, run_widest_sample, widest_batch

# Shares of the memory free after the weights that the KV cache takes by default.
_HOST_SHARE = 0.5
_HOST_LIMIT_BYTES = 4 << 30
_CUDA_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KVCache:
    """A rank's layers over their KV cache."""

    stack: DecoderStack
    num_blocks: int
    block_size: int
    window: int | None  # tokens that its queries reach at most; None: all
    host_blocks: HostBlocks | None = None  # copies of evicted blocks


def window_of(layers: Sequence[KVLayer]) -> int | None:
    """Returns how many tokens the queries of all layers reach at most; None: all."""
    windows = [layer.window for layer in layers if layer.window is not None]
    return max(windows) if windows and len(windows) == len(layers) else None


def allocate_kv_cache(
    options: EngineOptions, built: BuiltStack, block_size: int, longest: int, report: Progress
) -> KVCache:
    """Sizes the KV cache, allocates it and gives it to the layers. All ranks call it together, and
    get as many blocks as the one with the least memory. Raises KVCacheTooSmall."""
    report("allocating KV cache", 0.0)
    place = built.model.placement
    own = choose_num_blocks(options, built, block_size, longest)
    num_blocks = place.group.least(own, place.device)
    pool = KVCachePool(
        built.keeps, num_blocks, block_size, device=place.device, dtype=built.kv_dtype
    )
    host_blocks = None
    if options.kv_offloading_gb:
        num_slots = int(options.kv_offloading_gb * 2**30)
        num_slots //= block_bytes(built.keeps, block_size, built.kv_dtype)
        num_slots = place.group.least(num_slots, place.device)
        if num_slots < 1:
            raise KVCacheTooSmall("PENSTOCK_KV_OFFLOADING_GB cannot hold one block: raise it")
        host_blocks = HostBlocks(pool, num_slots)
    report("allocating KV cache", 1.0)
    window = window_of(built.keeps.kv_layers)
    return KVCache(built.stack(pool), num_blocks, block_size, window, host_blocks)


def choose_num_blocks(
    options: EngineOptions, built: BuiltStack, block_size: int, longest: int
) -> int:
    """Returns the blocks of the pool: by the options, or by the free memory.

    Without options it takes at most what all running sequences could fill twice; the second half
    serves the prefix cache. Raises KVCacheTooSmall.
    """
    keeps, kv_dtype = built.keeps, built.kv_dtype
    usual, least = _sequence_blocks(options, built, block_size, longest)
    if options.num_kv_blocks is not None:
        num_blocks = options.num_kv_blocks
    elif options.kv_cache_memory_gb is not None:
        memory = int(options.kv_cache_memory_gb * 2**30)
        num_blocks = blocks_that_fit(memory, keeps, block_size, kv_dtype)
    else:
        memory = _free_bytes(options, built, block_size, longest)
        num_blocks = blocks_that_fit(memory, keeps, block_size, kv_dtype)
        num_blocks = min(num_blocks, 2 * options.max_num_seqs * usual)
    if options.max_model_len is not None and num_blocks < least:
        raise KVCacheTooSmall(
            f"the KV cache holds {num_blocks * block_size} tokens, "
            f"max_model_len is {options.max_model_len}; "
            "raise PENSTOCK_KV_CACHE_MEMORY_GB or PENSTOCK_NUM_KV_BLOCKS"
        )
    return num_blocks


def _sequence_blocks(
    options: EngineOptions, built: BuiltStack, block_size: int, longest: int
) -> tuple[int, int]:
    """Returns the most blocks that a sequence of `longest` tokens holds at once, and the fewest
    with which it can be computed."""
    num_blocks = -(-longest // block_size)
    window = window_of(built.keeps.kv_layers)
    if window is None:
        return num_blocks, num_blocks
    steps = 2  # with the one in flight
    num_tokens = options.batched_tokens(is_cuda=built.model.placement.device.type == "cuda")
    usual = window_blocks(window, block_size, steps * num_tokens)
    return min(num_blocks, usual), min(num_blocks, window_blocks(window, block_size, steps))


def _free_bytes(options: EngineOptions, built: BuiltStack, block_size: int, longest: int) -> int:
    """Returns the bytes that this rank's KV cache may take beside its weights, the activations of
    the largest step and what drawing from all rows takes."""
    model, device = built.model, built.model.placement.device
    if device.type != "cuda":
        free = available_host_bytes() * options.memory_share
        limit = _HOST_LIMIT_BYTES // model.placement.group.size
        return min(int(free * _HOST_SHARE), limit)
    num_tokens = min(options.batched_tokens(is_cuda=True), longest)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pool = KVCachePool(
        built.keeps,
        -(-num_tokens // block_size),
        block_size,
        device=device,
        dtype=built.kv_dtype,
    )
    stack = built.stack(pool)
    if model.placement.group.rank == 0:
        runner = TorchModelRunner(
            model, stack, block_size=block_size, max_num_seqs=options.max_num_seqs
        )
        run_prefill(runner, block_size, num_tokens)
        run_widest_sample(runner, block_size, options.max_num_seqs)
        del runner
    else:
        forward = RankForward(
            model,
            stack,
            block_size=block_size,
            max_num_seqs=options.max_num_seqs,
            shares_tokens=False,
        )
        forward.run(ScheduledBatch((prefill(block_size, num_tokens),)))
        forward.run(widest_batch(block_size, options.max_num_seqs))
        del forward
    peak = torch.cuda.max_memory_allocated(device) - before
    captured = _captured_bytes(stack, device)
    del pool, stack
    built.release()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free * options.memory_share * _CUDA_SHARE) - peak - captured)


def _captured_bytes(stack: DecoderStack, device: torch.device) -> int:
    """Returns the memory that the stack's CUDA graphs take."""
    if not isinstance(stack, CapturingStack):
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    stack.capture(lambda share: None, largest_only=True)
    return max(0, free - torch.cuda.mem_get_info(device)[0])
