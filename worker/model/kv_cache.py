"""KVCachePool: the tensors that block ids index, and how many blocks fit."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.base import KeepsKV
from worker.model.device import huge_page_memory
from worker.model.errors import KVCacheTooSmall


class KVCachePool:
    """One allocation [blocks, numbers of a block], seen layer by layer.

    A block is contiguous over all layers, so that moving one somewhere else is one copy. `keys[i]`
    and `values[i]` are strided views of layer i, [blocks, block_size, kv_heads, key_dim] and [...,
    value_dim]. It begins as zeros.
    """

    def __init__(
        self,
        config: KeepsKV,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises KVCacheTooSmall where the blocks do not fit in memory."""
        layers = config.kv_layers
        shape = (num_blocks, block_size * sum(layer.numbers for layer in layers))
        size = num_blocks * block_bytes(config, block_size, dtype)
        try:
            if device.type == "cpu":
                # A step reads small pieces all over it: with ordinary pages, each one is a miss.
                self.storage = huge_page_memory(size).view(dtype).view(shape)
            else:
                self.storage = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError, OSError, ValueError, OverflowError) as error:
            raise KVCacheTooSmall(
                f"a KV cache of {num_blocks} blocks ({size / 2**30:.2f} GiB) does not fit in the "
                f"memory of {device}"
            ) from error
        self.num_blocks = num_blocks
        self.block_size = block_size
        keys: list[Tensor] = []
        values: list[Tensor] = []
        start = 0
        for layer in layers:
            for views, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                end = start + block_size * layer.num_kv_heads * dim
                part = self.storage[:, start:end]
                views.append(part.view(num_blocks, block_size, layer.num_kv_heads, dim))
                start = end
        self.keys = tuple(keys)
        self.values = tuple(values)


def block_bytes(config: KeepsKV, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block over all layers."""
    return block_size * sum(layer.numbers for layer in config.kv_layers) * dtype.itemsize


def blocks_that_fit(memory_bytes: int, config: KeepsKV, block_size: int, dtype: torch.dtype) -> int:
    """Returns how many blocks fit. Raises KVCacheTooSmall where not even one does."""
    size = block_bytes(config, block_size, dtype)
    if (num_blocks := memory_bytes // size) < 1:
        raise KVCacheTooSmall(
            f"{memory_bytes / 2**20:.1f} MiB for the KV cache cannot hold one block of "
            f"{size / 2**20:.1f} MiB ({block_size} tokens)"
        )
    return num_blocks
