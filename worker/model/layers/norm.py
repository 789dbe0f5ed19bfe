"""Root mean square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from worker.model.layers.linear import Placement


class RMSNorm(nn.Module):
    """The weight and epsilon of a norm; Ops.add_norm and Ops.rotate compute it."""

    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}weight", self.weight.data
