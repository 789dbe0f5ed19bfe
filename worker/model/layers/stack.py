"""DecoderStack: a model's layers over one KV cache, from token ids to final hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.model.attention.base import AttentionBackend, AttentionMetadata
from worker.model.layers.decoder import CausalLM


class DecoderStack(Protocol):
    """One step of all layers; everything that is counted is int32."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        """[num_tokens] twice -> final hidden states [N, hidden] of `rows` [N], until the next call.

        Rows come in order: of a sequence its last token in this step, or any run of its tokens.
        Writes the keys and values of all tokens to their slots.
        """
        ...


class LayerByLayer:
    """A DecoderStack of the model's own layers; the specification of the faster ones."""

    def __init__(self, model: CausalLM, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        self._backend.prepare(metadata)
        hidden: Tensor = self._model(token_ids, positions, self._backend)
        return hidden.index_select(0, rows)


class StackByRows:
    """A DecoderStack of two over the same model and pool."""

    def __init__(self, few: DecoderStack, many: DecoderStack, many_rows: int) -> None:
        """`many` computes steps of `many_rows` tokens and more."""
        self._few = few
        self._many = many
        self._many_rows = many_rows

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        stack = self._many if metadata.num_tokens >= self._many_rows else self._few
        return stack(token_ids, positions, metadata, rows)
