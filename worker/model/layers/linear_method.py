"""LinearMethod: one way to store the weights of linear layers and to multiply by them.

A layer owns its shape (LinearShape); its method owns the rest: the memory of the weights, the part
of the checkpoint that fills it on this rank, and the product. The loader fills the `shards` of the
weights. A layer computes by `reference` while they are loaded, and by `product` afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor
from torch.nn import functional

from worker.model.base import Activation, Multiply, Share
from worker.model.parallel.group import Placement


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint goes: `rows` and `columns` of it fill `data`.

    `columns` is None for a tensor of one dimension. `data` is [rows.size, columns.size] or
    [rows.size]; None where this rank needs nothing of the tensor. If it is in FP8, its scales
    and that of its inputs go to `scales` and `input_scale`, as in an Fp8Weight.
    """

    data: Tensor | None
    rows: Share
    columns: Share | None = None
    scales: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        rows = self.rows.whole
        return (rows,) if self.columns is None else (rows, self.columns.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """What a linear layer computes on this rank, whatever its weights are stored as.

    `parts` maps each checkpoint name ("q_proj") to its output features, in the order in which they
    come out. With an `activation` the parts are a gate and what it multiplies, of equal size.
    """

    in_features: Share
    parts: Mapping[str, Share]
    has_bias: bool
    adds_bias: bool  # on this rank; ranks whose results are added up have it once
    activation: Activation | None = None

    @property
    def out_size(self) -> int:
        """Rows of this rank's weight."""
        return sum(part.size for part in self.parts.values())

    def rows(self) -> Iterator[tuple[str, Share, slice]]:
        """Yields each part's name, its share, and its rows of the fused weight."""
        start = 0
        for name, part in self.parts.items():
            yield name, part, slice(start, start + part.size)
            start += part.size


class LinearWeights(Protocol):
    """The weights of one layer, as a method stores them."""

    def shards(self, shape: LinearShape, prefix: str) -> Iterator[tuple[str, Place]]:
        """Yields the checkpoint's names, after `prefix`, and the memory that they fill."""
        ...


class LinearMethod(ABC):
    """Serves all layers of a model that are stored alike. Equal methods are interchangeable."""

    def fits(self, shape: LinearShape) -> bool:
        """Returns whether a layer of this shape can be stored so; else it is dense."""
        return True

    @abstractmethod
    def create(self, shape: LinearShape, placement: Placement) -> LinearWeights:
        """Returns weights that the loader is to fill."""

    @abstractmethod
    def reference(self, shape: LinearShape, weights: LinearWeights) -> Multiply:
        """Returns [rows, in] -> [rows, out] by torch's operators, over weights that may change."""

    @abstractmethod
    def product(
        self, shape: LinearShape, weights: LinearWeights, input_sizes: Tensor | None = None
    ) -> Multiply:
        """Returns [rows, in] -> [rows, out] over loaded weights, which the caller lets go of.

        `input_sizes` [in] are the root mean squares of the inputs, where they were measured.
        """


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """`weight` [out, in] and `bias` [out] in the model's dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def shards(self, shape: LinearShape, prefix: str) -> Iterator[tuple[str, Place]]:
        for name, part, rows in shape.rows():
            yield f"{prefix}{name}.weight", Place(self.weight[rows], part, shape.in_features)
            yield from bias_shard(self.bias, shape, prefix + name, part, rows)


def bias_shard(
    bias: Tensor | None, shape: LinearShape, name: str, part: Share, rows: slice
) -> Iterator[tuple[str, Place]]:
    """Yields the place of a part's bias, if the checkpoint has one."""
    if shape.has_bias:
        yield f"{name}.bias", Place(None if bias is None else bias[rows], part)


class DenseMethod(LinearMethod):
    """Loads weights in the model's dtype. A subclass lays them out, or quantizes them, once."""

    # Whether products are more exact with `input_sizes`: they are measured by a pass of the model.
    measures_inputs = False

    def create(self, shape: LinearShape, placement: Placement) -> DenseWeights:
        return DenseWeights(
            placement.empty(shape.out_size, shape.in_features.size),
            placement.empty(shape.out_size) if shape.adds_bias else None,
        )

    def reference(self, shape: LinearShape, weights: LinearWeights) -> Multiply:
        assert isinstance(weights, DenseWeights), "they were created here"
        weight, bias = weights.weight, weights.bias
        return activated(lambda x: functional.linear(x, weight, bias), shape.activation)

    def product(
        self, shape: LinearShape, weights: LinearWeights, input_sizes: Tensor | None = None
    ) -> Multiply:
        assert isinstance(weights, DenseWeights), "they were created here"
        method = self if input_sizes is None else self.for_inputs(input_sizes)
        if shape.activation is None:
            return method.linear(weights.weight, weights.bias)
        return method.gated_linear(weights.weight, weights.bias, shape.activation)

    def for_inputs(self, sizes: Tensor) -> Self:
        """Returns the method for products whose inputs have these root mean squares [in]."""
        return self

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Returns a function [rows, in] -> [rows, out]; weight is [out, in], bias [out].

        Takes the weight over: after this its owner lets go of it.
        """

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        """Returns a function [rows, in] -> [rows, out / 2]: activation(gate) * up.

        weight is [out, in], its first half gate; bias [out].
        """
        return activated(self.linear(weight, bias), activation)


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """The methods of a model's layers: `stored` by the checkpoint's names of weights that are kept
    as they are stored, `dense` for all others."""

    dense: DenseMethod
    stored: Mapping[str, LinearMethod] = field(default_factory=dict)

    def choose(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        """Returns the method of a layer with these weights: dense where its parts differ."""
        methods = {self.stored.get(name, self.dense) for name in names}
        method = methods.pop() if len(methods) == 1 else self.dense
        return method if method.fits(shape) else self.dense


def activated(multiply: Multiply, activation: Activation | None) -> Multiply:
    """Returns `multiply`, or [rows, in] -> [rows, out / 2]: activation(gate) * up of its result."""
    if activation is None:
        return multiply

    def multiply_gated(x: Tensor) -> Tensor:  # [rows, in] -> [rows, out / 2]
        gate, up = multiply(x).chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    return multiply_gated
