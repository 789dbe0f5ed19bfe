"""NativeLayers: decoder layers of any model, one after the other, in one call of the kernels.

For models whose code is not ours; a NativeStack computes a native family from its token ids on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.cpu.library import Batch, Layer, NativeKernels, Stack
from worker.model.cpu.native_ops import NativeProduct, ProductBuffers, Workspace
from worker.model.cpu.native_stack import NativeAttention
from worker.model.layers.ops import HeadNorm, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Parameters of a pre-norm layer with a gated feed-forward block.

    The norms of the added parts, and those of heads, may be missing.
    """

    attention_norm: Norm
    attention_output_norm: Norm | None
    mlp_norm: Norm
    mlp_output_norm: Norm | None
    head_norm: HeadNorm | None
    qkv: NativeProduct
    output: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    num_heads: int
    num_kv_heads: int

    @property
    def norms(self) -> list[Norm]:
        """All that there are."""
        heads = self.head_norm
        norms = (
            self.attention_norm,
            self.attention_output_norm,
            self.mlp_norm,
            self.mlp_output_norm,
            heads.query if heads is not None else None,
            heads.key if heads is not None else None,
        )
        return [norm for norm in norms if norm is not None]

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers of one call have in common."""
        products = (self.qkv, self.output, self.gate_up, self.down)
        shapes = tuple((one.weight.n, one.weight.k) for one in products)
        norm = self.attention_norm
        return norm.eps, norm.adds_one, self.num_heads, self.num_kv_heads, shapes

    @property
    def has_one_norm(self) -> bool:
        """Whether all norms are of one kind, as the kernels compute them."""
        return len({(norm.eps, norm.adds_one) for norm in self.norms}) == 1


class LayerRooms:
    """Memory that layers use one after the other: late threads may still read what lies there."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.scratch = ProductBuffers(kernels)
        self._spaces: dict[tuple[str, int], Workspace] = {}
        self._places = torch.empty(0, dtype=torch.int32)
        self._rotation: tuple[Tensor, Tensor, Tensor] | None = None

    def rows(self, name: str, width: int, num_rows: int) -> Tensor:
        """Returns [num_rows, width] of that name, not filled."""
        space = self._spaces.get((name, width))
        if space is None:
            space = self._spaces[name, width] = Workspace(width, self.kernels)
        return space.rows(num_rows)

    def places(self, num_rows: int) -> Tensor:
        """Returns 0, 1, ... as int32, at least `num_rows` of them."""
        if len(self._places) < num_rows:
            self.kernels.settle()
            self._places = torch.arange(2 * num_rows, dtype=torch.int32)
        return self._places

    def rotation(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns copies of cosines and sines [T, 1, dim / 2], as [2 T, dim / 2]."""
        if self._rotation is None or self._rotation[0] is not cos or self._rotation[1] is not sin:
            both = self.rows("rotation", cos.shape[-1], 2 * len(cos))
            torch.cat((cos[:, 0], sin[:, 0]), out=both)
            self._rotation = (cos, sin, both)
        return self._rotation[2]


class NativeLayers:
    """Layers whose results are those of their parts through NativeOps and NativeAttention."""

    def __init__(self, layers: Sequence[LayerWeights], rooms: LayerRooms) -> None:
        """The layers are of one `kind`, and each `has_one_norm`."""
        self._weights = tuple(layers)  # keeps the memory of the addresses
        self._rooms = rooms
        first = layers[0]
        products = [p for one in layers for p in (one.qkv, one.output, one.gate_up, one.down)]
        # From how many rows on another product than the kernels' computes; 0: never.
        self.copy_rows = min((one.many_rows for one in products if one.many_rows), default=0)
        self._widest = max(one.weight.k for one in products)
        self._num_heads = first.num_heads
        hidden = len(first.attention_norm.weight)
        self._widths = {
            "x": hidden,
            "normed": hidden,
            "qkv": first.qkv.weight.n,
            "attended": first.output.weight.k,
            "inner": first.gate_up.weight.n,
            "delta": hidden,
        }
        self._layers = (Layer * len(layers))(*map(_layer, layers))
        self._stack = Stack(
            layers=self._layers,
            num_layers=len(layers),
            hidden=hidden,
            heads=first.num_heads,
            kv_heads=first.num_kv_heads,
            dim=first.output.weight.k // first.num_heads,
            final_norm=_address(first.attention_norm),  # what it gives is not used
            embedding_scale=1.0,
            norm_offset=float(first.attention_norm.adds_one),
            norm_eps=first.attention_norm.eps,
        )

    def __len__(self) -> int:
        return len(self._weights)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: NativeAttention, first: int
    ) -> Tensor:
        """Maps [T, hidden] to the same shape, in memory of its own.

        Cosines and sines are [T, 1, dim / 2], contiguous. `attention` has been prepared for these
        tokens; its layers are those from `first` on, which scale their scores alike.
        """
        num_tokens, hidden = x.shape
        rooms = self._rooms
        metadata, ragged = attention.step(self._num_heads)
        places = rooms.places(num_tokens).data_ptr()
        given = rooms.rows("given", hidden, num_tokens)
        given.copy_(x)
        rotation = rooms.rotation(cos, sin)
        for index, layer in enumerate(self._layers):
            attention.lend(self._stack, layer, first + index)
            layer.cosines = rotation.data_ptr()
            layer.sines = rotation[num_tokens:].data_ptr()
        self._stack.embedding = given.data_ptr()
        rows = {name: rooms.rows(name, n, num_tokens) for name, n in self._widths.items()}
        batch = Batch(
            tokens=num_tokens,
            ids=places,
            positions=places,  # of this step's own cosines
            slots=metadata.slots.data_ptr(),
            ragged=ragged,
            rows=places,
            num_rows=num_tokens,
            ragged_rows=ragged,
            scratch=rooms.scratch.of(num_tokens, self._widest),
            **{name: room.data_ptr() for name, room in rows.items()},
        )
        rooms.kernels.decoder_stack(self._stack, batch)
        return rows["x"].clone()

    def __del__(self) -> None:
        self._rooms.kernels.settle()  # a late thread may still read the weights


def _layer(weights: LayerWeights) -> Layer:
    heads = weights.head_norm
    return Layer(
        attention_norm=_address(weights.attention_norm),
        attention_output_norm=_address(weights.attention_output_norm),
        mlp_norm=_address(weights.mlp_norm),
        mlp_output_norm=_address(weights.mlp_output_norm),
        query_norm=_address(heads.query if heads is not None else None),
        key_norm=_address(heads.key if heads is not None else None),
        qkv=weights.qkv.weight,
        output=weights.output.weight,
        gate_up=weights.gate_up.weight,
        down=weights.down.weight,
    )


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
