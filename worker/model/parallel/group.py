"""RankGroup: this process's place among the ranks that hold a model, and what they exchange.

Heads, the feed-forward's inner features and the vocabulary are divided; the hidden states are not.
A rank computes with its heads and inner features and the sums of all ranks are added up, twice in
each layer. The logits are gathered at rank 0, which alone samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.model.base import Share
from worker.model.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Rank `rank` of `size`. With more than one, torch.distributed's default group has been made.

    The collectives are called by all ranks, in the same order, or all of them wait. On CPUs sums
    and the logits go through the `mesh`.
    """

    rank: int = 0
    size: int = 1
    mesh: Mesh | None = None

    def heads(self, num_heads: int) -> Share:
        """Returns this rank's query heads."""
        size = num_heads // self.size
        return Share(self.rank * size, size, num_heads)

    def kv_heads(self, num_kv_heads: int) -> Share:
        """Returns this rank's key heads: with fewer heads than ranks, the one that its query heads
        read, which other ranks have as well."""
        if num_kv_heads >= self.size:
            return self.heads(num_kv_heads)
        return Share(self.rank * num_kv_heads // self.size, 1, num_kv_heads)

    def features(self, num_features: int) -> Share:
        """Returns this rank's inner features of a feed-forward block."""
        return self.heads(num_features)

    def tokens(self, vocab_size: int) -> Share:
        """Returns this rank's part of the vocabulary; the last rank's may be smaller."""
        width = -(-vocab_size // self.size)
        start = min(self.rank * width, vocab_size)
        return Share(start, min(width, vocab_size - start), vocab_size)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, contiguous and of one shape, in x's memory."""
        if self.mesh is not None:
            self.mesh.sum(x)
        elif self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, part: Tensor, whole: int) -> Tensor:
        """Returns all ranks' columns at rank 0, [rows, whole]; elsewhere `part`.

        `part` is [rows, size of tokens(whole)], contiguous.
        """
        if self.size == 1:
            return part
        width = -(-whole // self.size)
        if part.shape[1] < width:
            part = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        parts: list[Tensor] = []
        if self.mesh is not None:
            parts = self.mesh.gather(part)
        elif self.rank == 0:
            parts = [torch.empty_like(part) for _ in range(self.size)]
            dist.gather(part, parts, dst=0)
        else:
            dist.gather(part, dst=0)
        return part if self.rank else torch.cat(parts, dim=1)[:, :whole]

    def broadcast(self, x: Tensor) -> None:
        """Fills `x` [...] at all ranks with rank 0's."""
        if self.size > 1:
            dist.broadcast(x, src=0)

    def least(self, number: int, device: torch.device) -> int:
        """Returns the smallest of all ranks' numbers."""
        if self.size == 1:
            return number
        there = torch.tensor([number], dtype=torch.int64, device=device)
        dist.all_reduce(there, dist.ReduceOp.MIN)
        return int(there.item())


ALONE = RankGroup()


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of a module's parameters, and which rank has them.

    Allocates them without filling: the loader writes every one.
    """

    device: torch.device
    dtype: torch.dtype
    group: RankGroup = ALONE
    chosen_kv_dtype: torch.dtype | None = None  # None: `dtype`

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        return self.dtype if self.chosen_kv_dtype is None else self.chosen_kv_dtype

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self.empty(*shape), requires_grad=False)
