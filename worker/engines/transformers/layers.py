"""Forward passes for attention modules and decoder layers of transformers, of fewer calls.

Queries, keys and values stay side by side as the product gives them, and one operation normalises
and rotates them. A layer calls its parts over rows, without transformers' code between them, and
layers that follow each other are one call of the kernels where these compute all their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from worker.engines.transformers.attention import AttentionMismatch, PagedAttention
from worker.engines.transformers.gates import GatedModule
from worker.engines.transformers.products import (
    SharedProduct,
    rows_of,
)
from worker.model.cpu.native_layers import NativeLayers
from worker.model.layers.ops import HeadNorm, Norm, Ops

EMBEDDINGS = "position_embeddings"  # a keyword of layers and of their attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """What an attention module is made of."""

    qkv: SharedProduct
    output: SharedProduct
    num_heads: int
    num_kv_heads: int
    norm: HeadNorm | None


class ShortAttention:
    """The `forward` of an attention module."""

    def __init__(
        self,
        own: Callable[..., Any],
        parts: AttentionParts,
        ops: Ops,
        attention: PagedAttention,
    ) -> None:
        """`own` is the module's own code, for when the attention is away."""
        self.parts = parts
        self.rotations = attention.rotations
        self._own = own
        self._ops = ops
        self._attention = attention

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._attention.is_away:
            return self._own(hidden_states, *args, **kwargs)
        return self.rows(rows_of(hidden_states), kwargs[EMBEDDINGS])[None], None

    def rows(self, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Maps [T, hidden] to the same shape; x is contiguous."""
        parts = self.parts
        cos, sin = self.rotations.of(embeddings)
        qkv, heads, norm = parts.qkv.multiply(x), parts.num_heads, parts.norm
        attended = self._attention.attend_unrotated(qkv, heads, norm, cos, sin)
        if attended is None:
            q, k, v = self._ops.rotate(qkv, heads, parts.num_kv_heads, norm, cos, sin)
            attended = self._attention.attend_rows(q, k, v)
        return parts.output.multiply(attended.view(len(x), -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The parts of a decoder layer. A layer may lack the norms of the added parts."""

    attention_norm: Norm
    attention_output_norm: Norm | None
    mlp_norm: Norm
    mlp_output_norm: Norm | None
    attention: ShortAttention
    mlp: nn.Module


class Run:
    """Layers whose results the network hands on as they are: the first computes them all."""

    def __init__(self, native: NativeLayers) -> None:
        self.native = native
        self.result: Tensor | None = None  # until the last of the layers has been called


class ShortLayer:
    """The `forward` of a decoder layer: pre-norm attention and feed-forward, each added."""

    def __init__(
        self, own: Callable[..., Any], parts: LayerParts, ops: Ops, attention: PagedAttention
    ) -> None:
        """`own` is the layer's own code, for when the attention is away."""
        self.parts = parts
        self._own = own
        self._ops = ops
        self._attention = attention
        self._run: Run | None = None
        self._is_first = self._is_last = False

    def join(self, run: Run, *, is_first: bool, is_last: bool) -> None:
        """Leaves this layer to `run`, where the attention is the kernels'."""
        self._run, self._is_first, self._is_last = run, is_first, is_last

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raises AttentionMismatch where a run's result arrives changed."""
        if self._attention.is_away:
            return self._own(hidden_states, *args, **kwargs)
        embeddings = kwargs[EMBEDDINGS]
        if self._run is not None:
            result = self._of_run(self._run, hidden_states, embeddings)
            if result is not None:
                return result
        return self._rows(rows_of(hidden_states), embeddings).view(hidden_states.shape)

    def _of_run(
        self, run: Run, hidden_states: Tensor, embeddings: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Returns what all layers of the run give; None where they are computed one by one."""
        if self._is_first:
            run.result = None
            x, native = rows_of(hidden_states), run.native
            if 0 < native.copy_rows <= len(x):
                return None
            if there := self._attention.next_layers(len(native)):
                cos, sin = self.parts.attention.rotations.of(embeddings)
                run.result = native(x, cos, sin, *there).view(hidden_states.shape)
        result = run.result
        if result is not None and not self._is_first and result is not hidden_states:
            raise AttentionMismatch("a layer is not given what the layer before it has given")
        if self._is_last:
            run.result = None
        return result

    def _rows(self, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Maps [T, hidden] to the same shape; x is contiguous."""
        parts, ops = self.parts, self._ops
        _, normed = ops.add_norm(x, None, parts.attention_norm)
        added = parts.attention.rows(normed, embeddings)
        if parts.attention_output_norm is None:
            x, normed = ops.add_norm(x + added, None, parts.mlp_norm)
        else:  # the caller keeps its x
            x, normed = ops.add_norm(x.clone(), added, parts.mlp_norm, parts.attention_output_norm)
        if isinstance(parts.mlp, GatedModule):
            added = parts.mlp.rows(normed)
        else:
            result = parts.mlp(normed[None])
            added = (result[0] if isinstance(result, tuple) else result).view(x.shape)
        if parts.mlp_output_norm is not None:
            _, added = ops.add_norm(added, None, parts.mlp_output_norm)
        return x + added
