"""Sizes and allocates the KV cache: by the options, or by the free memory."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from worker.engine.batch import ScheduledBatch
from worker.engine.config import least_tokens, window_blocks
from worker.engine_options import EngineOptions
from worker.model.base import DecoderStack, KVLayer
from worker.model.device import available_host_bytes
from worker.model.errors import KVCacheTooSmall
from worker.model.kv_cache import KVCachePool, KVGroups, block_bytes, blocks_that_fit
from worker.model.kv_offload import HostBlocks
from worker.model.served import BuiltStack, CapturingStack, Progress
from worker.model.step.rank_forward import RankForward
from worker.model.step.runner import TorchModelRunner
from worker.model.step.warm_up import prefill, run_prefill, run_widest_sample, widest_batch

log = logging.getLogger(__name__)

# Shares of the memory free after the weights that the KV cache takes by default.
_HOST_SHARE = 0.5
_HOST_LIMIT_BYTES = 4 << 30
_CUDA_SHARE = 0.9
# Each row of blocks is taken and given up group by group.
_MOST_GROUPS = 8
_WORTHWHILE = 0.9  # of the memory that a sequence takes with a single group
_STEPS = 2  # not committed: the one in flight is one of them


@dataclass(frozen=True, slots=True)
class KVCache:
    """A rank's layers over their KV cache."""

    stack: DecoderStack
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...]  # of its KV groups
    host_blocks: HostBlocks | None = None  # copies of evicted blocks


def allocate_kv_cache(
    options: EngineOptions, built: BuiltStack, block_size: int, longest: int, report: Progress
) -> KVCache:
    """Sizes the KV cache, allocates it and gives it to the layers. All ranks call it together, and
    get as many blocks as the one with the least memory. Raises KVCacheTooSmall."""
    report("allocating KV cache", 0.0)
    place = built.model.placement
    num_tokens = options.batched_tokens(is_cuda=place.device.type == "cuda")
    groups = choose_groups(built.keeps.kv_layers, block_size, longest, num_tokens)
    if options.kv_offloading_gb and len(groups.windows) > 1:
        groups = KVGroups.single(built.keeps.kv_layers)
        log.warning(
            "with PENSTOCK_KV_OFFLOADING_GB layers with a sliding window keep all tokens in the KV "
            "cache, like this model's other layers: without it more sequences would fit"
        )
    own = choose_num_blocks(options, built, block_size, longest, num_tokens, groups)
    num_blocks = place.group.least(own, place.device)
    pool = KVCachePool(
        built.keeps,
        num_blocks,
        block_size,
        device=place.device,
        dtype=built.kv_dtype,
        groups=groups,
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
    return KVCache(built.stack(pool), num_blocks, block_size, groups.windows, host_blocks)


def choose_groups(
    layers: Sequence[KVLayer], block_size: int, longest: int, num_tokens: int
) -> KVGroups:
    """Returns the groups with which a sequence of `longest` tokens takes the least memory while
    steps of `num_tokens` are computed; a single one where others are not worth their work.

    Blocks of several groups are equal, so that their layers have to be.
    """
    single = KVGroups.single(layers)
    kinds = [layer.window for layer in layers]
    if len(set(kinds)) == 1 or len({replace(layer, window=None) for layer in layers}) > 1:
        return single

    def layers_held(groups: KVGroups) -> int:
        return groups.size * _sequence_blocks(groups, block_size, longest, _STEPS * num_tokens)

    sizes = range(1, max(map(kinds.count, kinds)) + 1)
    others = [KVGroups.of_size(layers, size) for size in sizes]
    others = [groups for groups in others if len(groups.windows) <= _MOST_GROUPS]
    if not others:
        return single
    best = min(others, key=lambda groups: (layers_held(groups), len(groups.windows)))
    return best if layers_held(best) < _WORTHWHILE * layers_held(single) else single


def choose_num_blocks(
    options: EngineOptions,
    built: BuiltStack,
    block_size: int,
    longest: int,
    num_tokens: int,
    groups: KVGroups,
) -> int:
    """Returns the blocks of the pool: by the options, or by the free memory.

    Without options it takes at most what all running sequences could fill twice while steps of
    `num_tokens` are computed; the second half serves the prefix cache. Raises KVCacheTooSmall.
    """
    keeps, kv_dtype = built.keeps, built.kv_dtype
    if options.num_kv_blocks is not None:  # of all layers
        memory = options.num_kv_blocks * block_bytes(keeps, block_size, kv_dtype)
    elif options.kv_cache_memory_gb is not None:
        memory = int(options.kv_cache_memory_gb * 2**30)
    else:
        memory = _free_bytes(options, built, block_size, longest, groups)
    num_blocks = blocks_that_fit(memory, keeps, block_size, kv_dtype, groups)
    if options.num_kv_blocks is None and options.kv_cache_memory_gb is None:
        usual = _sequence_blocks(groups, block_size, longest, _STEPS * num_tokens)
        num_blocks = min(num_blocks, 2 * options.max_num_seqs * usual)
    if options.max_model_len is None:
        return num_blocks
    few_tokens = _STEPS * least_tokens(groups.windows, num_tokens)
    most_rows = bisect_right(
        range(1, longest + 1),
        num_blocks,
        key=lambda rows: _sequence_blocks(groups, block_size, rows * block_size, few_tokens),
    )
    if most_rows < -(-longest // block_size):
        raise KVCacheTooSmall(
            f"the KV cache holds {most_rows * block_size} tokens of a sequence, "
            f"max_model_len is {options.max_model_len}; "
            "raise PENSTOCK_KV_CACHE_MEMORY_GB or PENSTOCK_NUM_KV_BLOCKS"
        )
    return num_blocks


def _sequence_blocks(groups: KVGroups, block_size: int, longest: int, num_tokens: int) -> int:
    """Returns the most blocks that a sequence of `longest` tokens holds at once, if `num_tokens`
    are not committed."""
    num_rows = -(-longest // block_size)
    windows = [window for window in groups.windows if window is not None]
    num_full = len(groups.windows) - len(windows)
    if not windows:
        return num_full * num_rows
    held = window_blocks(max(windows), block_size, num_tokens)
    return num_full * num_rows + len(windows) * min(num_rows, held)


def _free_bytes(
    options: EngineOptions, built: BuiltStack, block_size: int, longest: int, groups: KVGroups
) -> int:
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
    num_groups = len(groups.windows)
    pool = KVCachePool(
        built.keeps,
        -(-num_tokens // block_size) * num_groups,
        block_size,
        device=device,
        dtype=built.kv_dtype,
        groups=groups,
    )
    stack = built.stack(pool)
    if model.placement.group.rank == 0:
        runner = TorchModelRunner(
            model,
            stack,
            block_size=block_size,
            max_num_seqs=options.max_num_seqs,
            num_kv_groups=num_groups,
        )
        run_prefill(runner, block_size, num_tokens, num_kv_groups=num_groups)
        run_widest_sample(runner, block_size, options.max_num_seqs, num_groups)
        del runner
    else:
        forward = RankForward(
            model,
            stack,
            block_size=block_size,
            max_num_seqs=options.max_num_seqs,
            shares_tokens=False,
            num_kv_groups=num_groups,
        )
        sequence = prefill(block_size, num_tokens, num_kv_groups=num_groups)
        forward.run(ScheduledBatch((sequence,)))
        forward.run(widest_batch(block_size, options.max_num_seqs, num_groups))
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
