"""Modules that own parameters: Linear, Embedding, TiedHead, RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.base import Activation, Multiply, Share
from worker.model.layers.linear_method import (
    DenseMethod,
    LinearMethod,
    LinearShape,
    LinearWeights,
    Place,
)
from worker.model.layers.ops import Norm
from worker.model.parallel.group import ALONE, Placement


class Linear(nn.Module):
    """`x @ weight.T + bias`, of the parts one after the other; see LinearShape.

    Ranks that have shares of the input features add their results up; those with shares of the
    output features have theirs alone. `create` comes first. After `finish` the weights are the
    method's and may have another form: `named_tensors` is over.
    """

    def __init__(
        self,
        in_features: Share,
        parts: Mapping[str, Share],
        *,
        bias: bool,
        placement: Placement,
        activation: Activation | None = None,
    ) -> None:
        """With an `activation` the two parts are gate and up: activation(gate(x)) * up(x)."""
        super().__init__()
        self._placement = placement
        self._group = placement.group if not in_features.is_all else ALONE
        self.shape = LinearShape(
            in_features=in_features,
            parts=dict(parts),
            has_bias=bias,
            adds_bias=bias and self._group.rank == 0,
            activation=activation,
        )
        self.input_sizes: Tensor | None = None  # root mean squares [in], where they are known
        self._method: LinearMethod
        self._weights: LinearWeights | None = None
        self._multiply: Multiply

    def create(self, method: LinearMethod) -> None:
        """Makes room for the weights, as `method` stores them."""
        self._method = method
        self._weights = method.create(self.shape, self._placement)
        self._multiply = method.reference(self.shape, self._weights)

    def finish(self) -> None:
        """Computes the method's product from now on; the weights are loaded."""
        weights, self._weights = self._loading(), None
        self._multiply = self._method.product(self.shape, weights, self.input_sizes)

    @property
    def product(self) -> Multiply:
        """The product, for code that computes whole layers."""
        return self._multiply

    def forward(self, x: Tensor) -> Tensor:
        """Maps [rows, in_features], in a form that the method's product takes, to [rows, sum of
        parts]."""
        return self._group.sum(self._multiply(x))

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Place]]:
        """Yields checkpoint names with the memory that they fill."""
        return self._loading().shards(self.shape, prefix)

    def _loading(self) -> LinearWeights:
        assert self._weights is not None, "the weights have been given to the method"
        return self._weights


class Embedding(nn.Module):
    """Token vectors; also the output matrix where the checkpoint ties the two.

    A rank has those of its part of the vocabulary. `scale` multiplies the vectors, not the matrix.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        # Rounded as the vectors are: sqrt(3072) is 55.5 in bfloat16.
        self.scale = 1.0 if scale is None else float(torch.tensor(scale).to(placement.dtype))
        self._group = placement.group
        self.tokens = self._group.tokens(vocab_size)
        self.weight = placement.parameter(self.tokens.size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps int32 ids [num_tokens] to [num_tokens, hidden]."""
        if self.tokens.is_all:
            return self._scaled(functional.embedding(token_ids, self.weight))
        places = token_ids - self.tokens.start
        is_elsewhere = (places < 0) | (places >= self.tokens.size)
        vectors = functional.embedding(places.masked_fill(is_elsewhere, 0), self.weight)
        return self._scaled(self._group.sum(vectors.masked_fill_(is_elsewhere[:, None], 0)))

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self.scale == 1.0 else vectors * self.scale

    def named_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        """Yields the checkpoint's `name` and what of it this rank has."""
        columns = Share.all_of(self.weight.shape[1])
        yield name, Place(self.weight.data, self.tokens, columns)


class TiedHead(nn.Module):
    """The embedding as output matrix: hidden states to logits of this rank's tokens."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding
        self.input_sizes: Tensor | None = None  # as a Linear's
        self._multiply: Multiply = self._dense

    def finish(self, method: DenseMethod) -> None:
        """Computes by `method` from now on; the embedding keeps its own copy for lookups."""
        if self.input_sizes is not None:
            method = method.for_inputs(self.input_sizes)
        self._multiply = method.linear(self._embedding.weight, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [rows, hidden] to [rows, vocab]."""
        return self._multiply(hidden)

    def _dense(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab]
        return torch.mm(hidden, self._embedding.weight.t())


class RMSNorm(nn.Module):
    """Weight [size] of a root mean square norm (arXiv:1910.07467).

    Ops.add_norm and Ops.rotate compute it.
    """

    def __init__(
        self, size: int, eps: float, *, adds_one: bool = False, placement: Placement
    ) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.norm = Norm(self.weight, eps, adds_one)

    def named_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        """Yields the checkpoint's `name` and all of it."""
        yield name, Place(self.weight.data, Share.all_of(len(self.weight)))
