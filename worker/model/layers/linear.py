"""Modules that own parameters: Linear, Embedding, TiedHead, RMSNorm; Placement of their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.layers.ops import Multiply, Ops, TorchOps


class Linear(nn.Module):
    """`x @ weight.T + bias`; `weight` holds the parts' rows one after the other.

    `parts` maps each checkpoint name ("q_proj") to its number of output features, in the order in
    which they come out. Once `use` has been called, the weight is the ops' and may have another
    form: `weight` and `bias` are None and `named_tensors` is over.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight: nn.Parameter | None = placement.parameter(out_features, in_features)
        self.bias: nn.Parameter | None = placement.parameter(out_features) if bias else None
        self._multiply = self._multiplier(TorchOps())

    def use(self, ops: Ops) -> None:
        """Computes with `ops` from now on."""
        self._multiply = self._multiplier(ops)
        self.weight = self.bias = None

    @property
    def product(self) -> Multiply:
        """The product, for code that computes whole layers."""
        return self._multiply

    def forward(self, x: Tensor) -> Tensor:
        """Maps [rows, in_features] to [rows, sum of parts]."""
        return self._multiply(x)

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yields checkpoint names with the rows of the fused parameters that they fill: [size, in]
        of a weight, [size] of a bias."""
        start = 0
        assert self.weight is not None, "the weight has been given to the ops"
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", self.weight.data[rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias.data[rows]
            start += size

    def _multiplier(self, ops: Ops) -> Multiply:
        return ops.linear(*self._parameters_given_away())

    def _parameters_given_away(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight [out, in] and the bias [out]."""
        assert self.weight is not None, "the weight has been given to the ops"
        return self.weight, self.bias


class GatedLinear(Linear):
    """Two parts of equal size, gate and up: silu(gate(x)) * up(x)."""

    def _multiplier(self, ops: Ops) -> Multiply:
        return ops.gated_linear(*self._parameters_given_away())


class Embedding(nn.Module):
    """Token vectors; also the output matrix where the checkpoint ties the two."""

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps int32 ids [num_tokens] to [num_tokens, hidden]."""
        return functional.embedding(token_ids, self.weight)


class TiedHead(nn.Module):
    """The embedding as output matrix: hidden states to logits."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding
        self._multiply: Multiply = self._dense

    def use(self, ops: Ops) -> None:
        """Computes with `ops` from now on; the embedding keeps its own copy for lookups."""
        self._multiply = ops.linear(self._embedding.weight, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [rows, hidden] to [rows, vocab]."""
        return self._multiply(hidden)

    def _dense(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab]
        return torch.mm(hidden, self._embedding.weight.t())


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of a module's parameters.

    Allocates them without filling: the loader writes every one.
    """

    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int) -> nn.Parameter:
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)


class RMSNorm(nn.Module):
    """Weight [size] and epsilon of a root mean square norm (arXiv:1910.07467).

    Ops.add_norm and Ops.rotate compute it.
    """

    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)
