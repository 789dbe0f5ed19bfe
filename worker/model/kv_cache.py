"""KVCachePool: the tensors that block ids index, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.base import KeepsKV, KVLayer
from worker.model.device import huge_page_memory
from worker.model.errors import KVCacheTooSmall


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Which layers share a block: those of one group. Any block may serve any group.

    A block has room for the layers of the largest group. With several groups all layers keep
    equally much of a token.
    """

    of_layers: tuple[int, ...]  # the group of each layer
    windows: tuple[int | None, ...]  # of each group, as EngineConfig has them

    @property
    def size(self) -> int:
        """Layers that a block has room for."""
        return max(map(self.of_layers.count, range(len(self.windows))))

    @classmethod
    def single(cls, layers: Sequence[KVLayer]) -> KVGroups:
        """Returns the one group of all layers."""
        return cls((0,) * len(layers), (window_of(layers),))

    @classmethod
    def of_size(cls, layers: Sequence[KVLayer], size: int) -> KVGroups:
        """Returns groups of up to `size` layers with the same window, those without one first."""
        windows: list[int | None] = []
        of_layers = [0] * len(layers)
        kinds = {layer.window for layer in layers}
        for kind in sorted(kinds, key=lambda window: (window is not None, window or 0)):
            own = [index for index, layer in enumerate(layers) if layer.window == kind]
            for begin in range(0, len(own), size):
                for index in own[begin : begin + size]:
                    of_layers[index] = len(windows)
                windows.append(kind)
        return cls(tuple(of_layers), tuple(windows))


def window_of(layers: Sequence[KVLayer]) -> int | None:
    """Returns how many tokens the queries of all layers reach at most; None: all."""
    windows = [layer.window for layer in layers if layer.window is not None]
    return max(windows) if windows and len(windows) == len(layers) else None


class KVCachePool:
    """One allocation [blocks, numbers of a block], seen layer by layer.

    A block is contiguous over all layers of a group, so that moving one somewhere else is one copy.
    `keys[i]` and `values[i]` are strided views of layer i, [blocks, block_size, kv_heads, key_dim]
    and [..., value_dim]; layers of different groups have the same. It begins as zeros.
    """

    def __init__(
        self,
        config: KeepsKV,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        groups: KVGroups | None = None,
    ) -> None:
        """Without `groups` there is one. Raises KVCacheTooSmall where the blocks do not fit in
        memory."""
        layers = config.kv_layers
        self.groups = KVGroups.single(layers) if groups is None else groups
        size = num_blocks * block_bytes(config, block_size, dtype, groups)
        shape = (num_blocks, size // num_blocks // dtype.itemsize)
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
        starts = [0] * len(self.groups.windows)  # of each group's next layer
        for layer, group in zip(layers, self.groups.of_layers, strict=True):
            start = starts[group]
            for views, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                end = start + block_size * layer.num_kv_heads * dim
                part = self.storage[:, start:end]
                views.append(part.view(num_blocks, block_size, layer.num_kv_heads, dim))
                start = starts[group] = end
        self.keys = tuple(keys)
        self.values = tuple(values)


def block_bytes(
    config: KeepsKV, block_size: int, dtype: torch.dtype, groups: KVGroups | None = None
) -> int:
    """Returns the bytes of one block, over all layers where there are no `groups`."""
    numbers = [layer.numbers for layer in config.kv_layers]
    kept = sum(numbers) if groups is None else sum(numbers[: groups.size])
    return block_size * kept * dtype.itemsize


def blocks_that_fit(
    memory_bytes: int,
    config: KeepsKV,
    block_size: int,
    dtype: torch.dtype,
    groups: KVGroups | None = None,
) -> int:
    """Returns how many blocks fit. Raises KVCacheTooSmall where not even one of each group does."""
    size = block_bytes(config, block_size, dtype, groups)
    least = 1 if groups is None else len(groups.windows)
    if (num_blocks := memory_bytes // size) < least:
        raise KVCacheTooSmall(
            f"{memory_bytes / 2**20:.1f} MiB for the KV cache cannot hold one block of "
            f"{least * size / 2**20:.1f} MiB ({block_size} tokens)"
        )
    return num_blocks
