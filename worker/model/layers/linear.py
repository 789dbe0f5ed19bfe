"""Modules that own parameters: Linear, Embedding, TiedHead, RMSNorm; Placement of their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.base import FP8, Activation, Share
from worker.model.layers.fp8 import BLOCK, Fp8Layout, Fp8Weight
from worker.model.layers.ops import Fp8Ops, Multiply, Norm, Ops, TorchOps, for_inputs
from worker.model.parallel.group import ALONE, Placement

_FP8_WIDTH = 16  # rows and columns that FP8 products come in


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint goes: `rows` and `columns` of it fill `data`.

    `columns` is None for a tensor of one dimension. `data` is [rows.size, columns.size] or
    [rows.size]; None where this rank needs nothing of the tensor. Where it is in FP8, its scales
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


class Linear(nn.Module):
    """`x @ weight.T + bias`; `weight` holds the parts' rows one after the other.

    `parts` maps each checkpoint name ("q_proj") to its output features, in the order in which they
    come out. Ranks that have shares of the input features add their results up; those with shares
    of the output features have theirs alone. `allocate` comes first. Once `use` has been called,
    the weight is the ops' and may have another form: `weight` and `bias` are None and
    `named_tensors` is over.
    """

    def __init__(
        self, in_features: Share, parts: Mapping[str, Share], *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.in_features = in_features
        self._placement = placement
        self._group = placement.group if not in_features.is_all else ALONE
        self._has_bias = bias
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self._fp8: Fp8Weight | None = None
        self.input_sizes: Tensor | None = None  # root mean squares [in], where they are known
        self._multiply: Multiply

    def allocate(self, layouts: Sequence[Fp8Layout | None] = ()) -> None:
        """Makes room for the weight, as the parts are stored; without `layouts` in plain numbers.

        Parts of several kinds are one weight in the model's dtype, and so are blocks that its rows
        or this rank's share cut.
        """
        place = self._placement.parameter
        rows, columns = sum(part.size for part in self.parts.values()), self.in_features.size
        layout = layouts[0] if len(set(layouts)) == 1 else None
        if layout is None or not self._divides(layout):
            self.weight = place(rows, columns)
        else:
            self.weight = place(rows, columns, dtype=FP8)
            by = (rows // BLOCK, columns // BLOCK) if layout.in_blocks else (rows,)
            self._fp8 = Fp8Weight(
                self.weight.data,
                place(*by, dtype=torch.float32).data,
                place(1, dtype=torch.float32).data.zero_() if layout.has_input_scale else None,
            )
        if self._has_bias and self._group.rank == 0:  # else it would be added once by each rank
            self.bias = place(rows)
        self._multiply = self._multiplier(TorchOps())

    def _divides(self, layout: Fp8Layout) -> bool:
        """Returns whether FP8 products can be had of this rank's part of the weight."""
        rows, columns = sum(part.size for part in self.parts.values()), self.in_features
        if not layout.in_blocks:
            return not (rows % _FP8_WIDTH or columns.size % _FP8_WIDTH)
        shares = (*self.parts.values(), columns)
        return not any(share.start % BLOCK or share.size % BLOCK for share in shares)

    def use(self, ops: Ops) -> None:
        """Computes with `ops` from now on."""
        self._multiply = self._multiplier(for_inputs(ops, self.input_sizes))
        self.weight = self.bias = self._fp8 = None

    @property
    def product(self) -> Multiply:
        """The product, for code that computes whole layers."""
        return self._multiply

    def forward(self, x: Tensor) -> Tensor:
        """Maps [rows, in_features] to [rows, sum of parts]."""
        return self._group.sum(self._multiply(x))

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Place]]:
        """Yields checkpoint names with the rows of the fused parameters that they fill."""
        start = 0
        assert self.weight is not None, "the weight has been given to the ops"
        for name, part in self.parts.items():
            rows = slice(start, start + part.size)
            scales = input_scale = None
            if (fp8 := self._fp8) is not None:
                input_scale = fp8.input_scale
                in_blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
                scales = fp8.scales[in_blocks if fp8.in_blocks else rows]
            data = self.weight.data[rows]
            place = Place(data, part, self.in_features, scales, input_scale)
            yield f"{prefix}{name}.weight", place
            if self._has_bias:
                bias = self.bias.data[rows] if self.bias is not None else None
                yield f"{prefix}{name}.bias", Place(bias, part)
            start += part.size

    def _multiplier(self, ops: Ops) -> Multiply:
        weight, bias = self._parameters_given_away()
        if isinstance(weight, Fp8Weight):
            return _fp8(ops).fp8_linear(weight, bias)
        return ops.linear(weight, bias)

    def _parameters_given_away(self) -> tuple[Tensor | Fp8Weight, Tensor | None]:
        """Returns the weight [out, in] and the bias [out]."""
        assert self.weight is not None, "the weight has been given to the ops"
        return self._fp8 or self.weight, self.bias


def _fp8(ops: Ops) -> Fp8Ops:
    assert isinstance(ops, Fp8Ops), "weights stay in FP8 where the tier multiplies by them"
    return ops


class GatedLinear(Linear):
    """Two parts of equal size, gate and up: activation(gate(x)) * up(x)."""

    def __init__(
        self,
        in_features: Share,
        parts: Mapping[str, Share],
        *,
        bias: bool,
        activation: Activation,
        placement: Placement,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, placement=placement)
        self._activation: Activation = activation

    def _multiplier(self, ops: Ops) -> Multiply:
        weight, bias = self._parameters_given_away()
        if isinstance(weight, Fp8Weight):
            return _fp8(ops).gated_fp8_linear(weight, bias, self._activation)
        return ops.gated_linear(weight, bias, self._activation)


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

    def use(self, ops: Ops) -> None:
        """Computes with `ops` from now on; the embedding keeps its own copy for lookups."""
        self._multiply = for_inputs(ops, self.input_sizes).linear(self._embedding.weight, None)

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
