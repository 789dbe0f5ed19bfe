"""CudaStack: a native family's layers, launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.cuda.attention import TritonAttention
from worker.model.cuda.fp8 import fp8_linear
from worker.model.cuda.layers import add_norm, gate, rotate_and_store
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, DecoderLayer
from worker.model.layers.fp8 import Fp8Weight
from worker.model.layers.linear import Linear
from worker.model.layers.ops import Activation, HeadNorm, Multiply, Norm, TorchOps


class CudaOps(TorchOps):
    """Products by torch, what stands between them by kernels of this project.

    Rotations are not among them: CudaStack rotates and stores in one kernel. Used layer by layer,
    those of TorchOps rotate.
    """

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        multiply = self.linear(weight, bias)
        return lambda x: gate(multiply(x), activation)

    def fp8_linear(self, weight: Fp8Weight, bias: Tensor | None) -> Multiply:
        return fp8_linear(weight, bias)

    def gated_fp8_linear(
        self, weight: Fp8Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        multiply = fp8_linear(weight, bias)
        return lambda x: gate(multiply(x), activation)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, norm, delta_norm)


class CudaStack:
    """A DecoderStack over a model that uses CudaOps.

    A layer is four products, the two kernels of attention (one where its keys are not split), and
    four more: two norms, the rotation that stores keys and values, the gate.
    """

    def __init__(self, model: CausalLM, pool: KVCachePool) -> None:
        self._model = model
        self._pool = pool
        self._attention = TritonAttention(pool, model.config.layer_scores)
        self._layers = [
            _Layer(layer, model) for layer in model.layers if isinstance(layer, DecoderLayer)
        ]
        assert len(self._layers) == model.config.num_layers, "models are made of DecoderLayers"

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        x, delta, delta_norm = self.layers(token_ids, positions, metadata)
        # The last norm is of the rows that are wanted alone.
        return self.normed(x.index_select(0, rows), delta.index_select(0, rows), delta_norm)

    def layers(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor, Norm | None]:
        """Returns the residual stream [num_tokens, hidden], what the last layer adds to it, and by
        which norm that is normalised first. Arguments are those of a DecoderStack."""
        attention = self._attention
        attention.prepare(metadata)
        x: Tensor = self._model.embed_tokens(token_ids)
        delta: Tensor | None = None
        delta_norm: Norm | None = None
        for index, layer in enumerate(self._layers):
            x, normed = add_norm(x, delta, layer.attention_norm, delta_norm)
            q = rotate_and_store(
                layer.qkv(normed),
                positions,
                metadata.slots,
                layer.rotations,
                layer.head_norm,
                self._pool.keys[index],
                self._pool.values[index],
            )
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attention.attend(index, q, attended)
            added = layer.output(attended.view(len(attended), -1))
            x, normed = add_norm(x, added, layer.mlp_norm, layer.attention_output_norm)
            delta, delta_norm = layer.mlp(normed), layer.mlp_output_norm
        assert delta is not None, "a model has a layer"
        return x, delta, delta_norm

    def normed(self, x: Tensor, delta: Tensor, delta_norm: Norm | None) -> Tensor:
        """Returns the final hidden states [rows, hidden] of what `layers` returned."""
        return add_norm(x, delta, self._model.norm.norm, delta_norm)[1]


class _Layer:
    """What CudaStack needs of a DecoderLayer, looked up once: a step has no time for it."""

    def __init__(self, layer: DecoderLayer, model: CausalLM) -> None:
        attention = layer.self_attn
        self.qkv: Linear = attention.qkv
        self.output: Linear = attention.output
        self.mlp: Callable[[Tensor], Tensor] = layer.mlp
        self.attention_norm: Norm = layer.input_layernorm.norm
        self.attention_output_norm: Norm | None = layer.attention_output_norm
        self.mlp_norm: Norm = layer.mlp_norm
        self.mlp_output_norm: Norm | None = layer.mlp_output_norm
        self.head_norm: HeadNorm | None = attention.head_norm
        rope = model.local_rope if attention.kind.is_local else model.rope
        self.rotations = rope.tables
