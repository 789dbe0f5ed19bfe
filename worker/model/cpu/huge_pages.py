"""Memory that the kernel may back with huge pages: fewer misses when weights are streamed."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64  # of every tensor: a cache line


class HugePages:
    """Copies of tensors, one after the other in large pieces of memory.

    Without an allocation of its own, a weight of a few MiB would lie in ordinary pages. A piece
    is given back when the last tensor in it is gone. On the CPU only.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, aligned to 64 bytes."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._piece.numel():
            self._piece = huge_page_memory(max(size, _PIECE_BYTES))
            self._used = 0
        place = self._piece[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def huge_page_memory(size: int) -> Tensor:
    """`size` bytes of zeros, [size] uint8; they take memory as they are written.

    Raises OSError where the system has not so much.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them: ordinary pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
