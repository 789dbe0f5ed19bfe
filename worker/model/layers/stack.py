"""DecoderStack: a model's layers over one KV cache, from token ids to final hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.model.attention.base import AttentionBackend, AttentionMetadata
from worker.model.layers.decoder import CausalLM


class DecoderStack(Protocol):
    """One step of all layers; tokens and positions are int32."""

    def __call__(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens] twice -> final hidden states [num_tokens, hidden], until the next call.

        Writes the tokens' keys and values to their slots.
        """
        ...


class LayerByLayer:
    """A DecoderStack of the model's own layers; the specification of the faster ones."""

    def __init__(self, model: CausalLM, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def __call__(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        self._backend.prepare(metadata)
        hidden: Tensor = self._model(token_ids, positions, self._backend)
        return hidden
