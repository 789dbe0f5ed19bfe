"""KV blocks of a request whose computation was not finite: made harmless before others get them.

vLLM masks what lies in a block beyond a sequence's end by a weight of zero, and zero times NaN is
NaN: the next owner of such a block would fail as well. It also finds full blocks again by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLMEngine


def discard_content(llm: LLMEngine, vllm_id: str) -> None:
    """Makes the blocks of a running request finite, and takes them out of the prefix cache.

    Healthy blocks that it shares with others keep their content. Raises RuntimeError where the
    layout of vLLM's cache is not known.
    """
    manager = llm.engine_core.engine_core.scheduler.kv_cache_manager
    block_ids = sorted({block for group in manager.get_block_ids(vllm_id) for block in group})
    manager.evict_blocks(set(block_ids))
    num_blocks = llm.vllm_config.cache_config.num_gpu_blocks
    llm.collective_rpc(make_finite, args=(block_ids, num_blocks))


def make_finite(worker: Any, block_ids: Sequence[int], num_blocks: int) -> None:
    """Replaces by zero what is not finite in these of `num_blocks` blocks of a worker's cache."""
    for cache in worker.model_runner.kv_caches:
        if num_blocks not in cache.shape or not cache.is_floating_point():
            raise RuntimeError("vLLM's KV cache has a layout that is not known here")
        axis = cache.shape.index(num_blocks)
        index = torch.tensor(block_ids, device=cache.device)
        content = cache.index_select(axis, index).nan_to_num_(0.0, 0.0, 0.0)
        cache.index_copy_(axis, index, content)
