"""KVCachePool: the tensors that block ids index, and how many of them fit."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.config import ModelConfig
from worker.model.device import huge_page_memory
from worker.model.errors import KVCacheTooSmall


class KVCachePool:
    """One allocation [blocks, layers, 2, block_size, kv_heads, head_dim], seen layer by layer.

    A block is contiguous over all layers, so that moving one somewhere else is one copy; `keys[i]`
    and `values[i]` are strided views [blocks, block_size, kv_heads, head_dim] of layer i. It begins
    as zeros.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises KVCacheTooSmall where the memory does not hold so many blocks."""
        shape = (
            num_blocks,
            config.num_layers,
            2,
            block_size,
            config.num_kv_heads,
            config.head_dim,
        )
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
        layers = range(config.num_layers)
        self.keys: tuple[Tensor, ...] = tuple(self.storage[:, layer, 0] for layer in layers)
        self.values: tuple[Tensor, ...] = tuple(self.storage[:, layer, 1] for layer in layers)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block over all layers."""
    places = config.num_layers * 2 * block_size
    return places * config.num_kv_heads * config.head_dim * dtype.itemsize


def blocks_that_fit(
    memory_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype
) -> int:
    """Returns how many blocks fit. Raises KVCacheTooSmall where not even one does."""
    size = block_bytes(config, block_size, dtype)
    if (num_blocks := memory_bytes // size) < 1:
        raise KVCacheTooSmall(
            f"{memory_bytes / 2**20:.1f} MiB for the KV cache hold no block of "
            f"{size / 2**20:.1f} MiB ({block_size} tokens)"
        )
    return num_blocks
