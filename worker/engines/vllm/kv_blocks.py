"""KV blocks of requests whose computation was not finite: not found again, and zero before others
get them.

vLLM finds full blocks again by the hash of their tokens. What lies in a block beyond a sequence's
end it masks by a weight of zero, and zero times NaN is NaN, in floats of eight bits as well: the
next owner of such a block would fail too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from worker.engines.vllm.vllm_compat import block_pool_of, blocks_of, call_before_free, kv_caches_of

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

log = logging.getLogger(__name__)


class FailedBlocks:
    """The blocks of failed requests in one LLMEngine.

    Blocks that other requests hold as well keep their content until the last of these has ended:
    with zeros instead of NaN it would continue with wrong output.
    """

    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm
        self._freed: dict[str, list[KVCacheBlock]] = {}  # since the start of the last step
        self._held: dict[int, KVCacheBlock] = {}  # by others; by block id
        call_before_free(llm, self._note_freed)

    def discard(self, vllm_id: str) -> None:
        """Removes the blocks of a request that ended since the start of the last step from the
        prefix cache, and clears those that no other request holds."""
        blocks = self._freed.pop(vllm_id, None) or blocks_of(self._llm, vllm_id)
        for block in blocks:
            block.pool.evict_blocks({block.block_id})
        # Ids of another pool, such as one on the host, are no places in the device's caches.
        pool = block_pool_of(self._llm)
        self._held |= {block.block_id: block for block in blocks if block.pool is pool}
        self._clear_free()

    def begin_step(self) -> None:
        """Clears blocks that have become free, before vLLM reuses them in its next step."""
        self._freed.clear()
        if self._held:
            self._clear_free()

    def _note_freed(self, vllm_id: str) -> None:
        self._freed[vllm_id] = blocks_of(self._llm, vllm_id)

    def _clear_free(self) -> None:
        block_ids = sorted(i for i, block in self._held.items() if block.ref_cnt == 0)
        if not block_ids:
            return
        for block_id in block_ids:
            del self._held[block_id]
        num_blocks = self._llm.vllm_config.cache_config.num_gpu_blocks
        unknown = max(self._llm.collective_rpc(zero_blocks, args=(block_ids, num_blocks)))
        if unknown:
            log.warning(
                "unknown KV cache layout in some layers: blocks of a failed request are not "
                "cleared there and may fail the next request that uses them",
                extra={"layers": unknown},
            )


def zero_blocks(worker: Any, block_ids: Sequence[int], num_blocks: int) -> int:
    """Makes all bytes of these of `num_blocks` blocks zero in all layers' caches of a worker.

    Returns the number of layers whose cache does not have its blocks in the first dimension; these
    are not changed.
    """
    unknown = 0
    for cache in kv_caches_of(worker):
        if cache.dim() < 2 or cache.shape[0] % num_blocks:
            unknown += 1
            continue
        # One of the scheduler's blocks may be several of the attention's.
        parts = cache.unflatten(0, (num_blocks, -1))
        if cache.element_size() == 1:  # no kernel fills floats of eight bits by index
            parts = parts.view(torch.uint8)
        parts.index_fill_(0, torch.tensor(block_ids, device=cache.device), 0)
    return unknown
