"""CudaStack: a native family's layers, launched kernel by kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.base import Activation, AttentionMetadata, Multiply, RunInto
from worker.model.cuda.attention import TritonAttention
from worker.model.cuda.experts import Experts
from worker.model.cuda.fp8 import Fp8GatedProduct, Fp8Product
from worker.model.cuda.gemv import GatedProduct, Product, gemv
from worker.model.cuda.layers import Rounded, add_norm, add_norm_rounded, rotate_and_store
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, DecoderLayer
from worker.model.layers.linear import Linear
from worker.model.layers.ops import ComputeExperts, ExpertWeights, HeadNorm, Norm, TorchOps


class CudaOps(TorchOps):
    """Products by torch, what stands between them by kernels of this project.

    Rotations are not among them: CudaStack rotates and stores in one kernel. Used layer by layer,
    those of TorchOps rotate.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return Product(weight, bias)

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        return GatedProduct(Product(weight, bias), activation)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, norm, delta_norm)

    def experts(self, weights: ExpertWeights) -> ComputeExperts:
        return Experts(weights)


class CudaStack:
    """A DecoderStack over a model that uses CudaOps.

    A layer is four products, the two kernels of attention, and four more: two norms, the rotation
    that stores keys and values, the gate. For a few tokens the products can have the norms and the
    gate with them. In FP8, norms and the gate round what the products take; the output of attention
    is rounded by a launch of its own.
    """

    def __init__(self, model: CausalLM, pool: KVCachePool, *, is_invariant: bool = False) -> None:
        """`is_invariant`: as TritonAttention; for a model that uses InvariantOps."""
        self._model = model
        self._pool = pool
        scores = model.config.layer_scores
        self._attention = TritonAttention(pool, scores, is_invariant=is_invariant)
        self._layers = [
            _Layer(layer, model) for layer in model.layers if isinstance(layer, DecoderLayer)
        ]
        assert len(self._layers) == model.config.num_layers, "models are made of DecoderLayers"
        self.hidden_size = model.config.hidden_size
        self.dtype = model.placement.dtype

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        x, delta = self.layers(token_ids, positions, metadata)
        # The last norm is of the rows that are wanted alone.
        return self.normed(x.index_select(0, rows), delta.index_select(0, rows))

    def run_into(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, out: Tensor
    ) -> None:
        """Computes the final hidden states [num_tokens, hidden] of all tokens, in `out`."""
        x, delta = self.layers(token_ids, positions, metadata)
        self.normed(x, delta, out)

    @property
    def layer_weights(self) -> int:
        """Returns the numbers in the products of the largest layer."""
        return max(layer.num_weights for layer in self._layers)

    @property
    def run_gemv_into(self) -> RunInto | None:
        """Returns `run_into` by `gemv_layers`; None where those do not compute this model."""
        return self._run_gemv_into if all(layer.is_plain for layer in self._layers) else None

    def _run_gemv_into(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, out: Tensor
    ) -> None:
        self.normed(self.gemv_layers(token_ids, positions, metadata), None, out)

    def layers(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [num_tokens, hidden] and what the last layer adds to it.

        Arguments are those of a DecoderStack.
        """
        attention = self._attention
        attention.prepare(metadata)
        x: Tensor = self._model.embed_tokens(token_ids)
        delta: Tensor | None = None
        delta_norm: Norm | None = None
        for index, layer in enumerate(self._layers):
            x, normed = _normed_for(layer.qkv, x, delta, layer.attention_norm, delta_norm)
            attended = self._attend(index, layer.qkv(normed), positions, metadata)
            added = layer.output(attended)
            x, normed = _normed_for(
                layer.gate_up, x, added, layer.mlp_norm, layer.attention_output_norm
            )
            delta, delta_norm = layer.down(_inner(layer, normed)), layer.mlp_output_norm
        assert delta is not None, "a model has a layer"
        return x, delta

    def gemv_layers(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Returns the residual stream [num_tokens, hidden] after the last layer, of 1, 2 or 4
        tokens; as `layers`, but a layer is four launches and those of attention."""
        self._attention.prepare(metadata)
        x: Tensor = self._model.embed_tokens(token_ids)
        for index, layer in enumerate(self._layers):
            qkv = gemv(x, _plain(layer.qkv), norm=layer.attention_norm)
            attended = self._attend(index, qkv, positions, metadata)
            x = gemv(attended, _plain(layer.output), residual=x)
            inner = gemv(x, _plain(layer.gate_up), norm=layer.mlp_norm)
            x = gemv(inner, _plain(layer.down), residual=x)
        return x

    def _attend(
        self, index: int, qkv: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Stores a layer's keys and values; returns the attention, [tokens, heads * dim]."""
        layer = self._layers[index]
        q = rotate_and_store(
            qkv,
            positions,
            metadata.slots[self._pool.groups.of_layers[index]],
            layer.rotations,
            layer.head_norm,
            self._pool.keys[index],
            self._pool.values[index],
        )
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attention.attend(index, q, attended)
        return attended.view(len(attended), -1)

    def normed(self, x: Tensor, delta: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Returns the final hidden states [rows, hidden] of what `layers` returned, in `out` where
        there is one."""
        delta_norm = self._layers[-1].mlp_output_norm
        return add_norm(x, delta, self._model.norm.norm, delta_norm, out)[1]


class _Layer:
    """What CudaStack needs of a DecoderLayer, looked up once: a step has no time for it."""

    def __init__(self, layer: DecoderLayer, model: CausalLM) -> None:
        attention = layer.self_attn
        self.qkv, self.output = attention.qkv, attention.output
        self.gate_up, self.down = layer.mlp.gate_up, layer.mlp.down
        self.attention_norm: Norm = layer.input_layernorm.norm
        self.attention_output_norm: Norm | None = layer.attention_output_norm
        self.mlp_norm: Norm = layer.mlp_norm
        self.mlp_output_norm: Norm | None = layer.mlp_output_norm
        self.head_norm: HeadNorm | None = attention.head_norm
        rope = model.local_rope if attention.kind.is_local else model.rope
        self.rotations = rope.tables

    @property
    def num_weights(self) -> int:
        """Returns the numbers in its products."""
        shapes = [one.shape for one in (self.qkv, self.output, self.gate_up, self.down)]
        return sum(shape.in_features.size * shape.out_size for shape in shapes)

    @property
    def is_plain(self) -> bool:
        """Whether its norms are those of its inputs, and its products those of CudaOps."""
        products = (self.qkv, self.output, self.gate_up, self.down)
        return self.attention_output_norm is None and all(
            isinstance(linear.product, Product | GatedProduct) for linear in products
        )


def _normed_for(
    linear: Linear, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None
) -> tuple[Tensor, Tensor | Rounded]:
    """Returns what Ops.add_norm does; the norm is rounded where the layer multiplies in FP8."""
    product = linear.product
    if isinstance(product, Fp8GatedProduct):
        product = product.product
    if not isinstance(product, Fp8Product):
        return add_norm(x, delta, norm, delta_norm)
    return add_norm_rounded(x, delta, norm, delta_norm, product.rounding)


def _inner(layer: _Layer, normed: Tensor | Rounded) -> Tensor | Rounded:
    """Returns the input of an MLP's last product, rounded where that multiplies in FP8."""
    gated, down = layer.gate_up.product, layer.down.product
    if isinstance(gated, Fp8GatedProduct) and isinstance(down, Fp8Product):
        return gated.rounded(normed, down.rounding)
    inner: Tensor = layer.gate_up(normed)
    return inner


def _plain(linear: Linear) -> Product | GatedProduct:
    product = linear.product
    assert isinstance(product, Product | GatedProduct), "see is_plain"
    return product
