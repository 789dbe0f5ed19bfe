"""HostBlocks: copies of KV blocks in host memory, and their way from and to the pool."""

from __future__ import annotations

import weakref
from typing import cast

import torch
from torch import Tensor

from worker.engine.offload import Store, Transfers
from worker.model.device import available_host_bytes, huge_page_memory, pin, unpin
from worker.model.errors import KVCacheTooSmall
from worker.model.kv_cache import KVCachePool

# Evicted blocks that a step copies before it computes: about 50 ms of a fast bus, or 250 ms of a
# slow memory.
_CUDA_STORE_BYTES = 2 << 30
_CPU_STORE_BYTES = 256 << 20


class HostBlocks:
    """`slots` [slots, bytes of a block] uint8, each with room for one block of the pool.

    From and to CUDA the copies are enqueued on the stream that computes, and the host does not
    wait: the steps before have written a block by then, those after reuse it. The memory is pinned.
    """

    def __init__(self, pool: KVCachePool, num_slots: int) -> None:
        """Raises KVCacheTooSmall where the slots do not fit in memory."""
        self._blocks = pool.storage.view(torch.uint8)
        self._is_cuda = pool.storage.device.type == "cuda"
        shape = (num_slots, self._blocks.shape[1])
        store_bytes = _CUDA_STORE_BYTES if self._is_cuda else _CPU_STORE_BYTES
        self.stores_per_step = max(1, store_bytes // shape[1])
        size, free = shape[0] * shape[1], available_host_bytes()
        if size > free:
            raise KVCacheTooSmall(
                f"PENSTOCK_KV_OFFLOADING_GB needs {size / 2**30:.2f} GiB of host memory, "
                f"{free / 2**30:.2f} GiB are free: lower it"
            )
        try:
            self.slots = huge_page_memory(size).view(shape)
            if self._is_cuda:
                pin(self.slots)
                # Memory that is unmapped while it is pinned could not be pinned again.
                weakref.finalize(self, unpin, self.slots).atexit = False
        except (RuntimeError, MemoryError, OSError) as error:
            raise KVCacheTooSmall(
                f"PENSTOCK_KV_OFFLOADING_GB: {size / 2**30:.2f} GiB of host memory cannot be "
                f"allocated: {error}"
            ) from error

    def run(self, transfers: Transfers) -> None:
        """Makes the copies, in their order. A Load's source is a slot, or the content [bytes]."""
        for item in transfers:
            block = self._blocks[item.block_id]
            if isinstance(item, Store):
                self.slots[item.slot].copy_(block, non_blocking=True)
            elif isinstance(item.source, int):
                block.copy_(self.slots[item.source], non_blocking=True)
            else:
                content = cast(Tensor, item.source)
                block.copy_(content.pin_memory() if self._is_cuda else content, non_blocking=True)
