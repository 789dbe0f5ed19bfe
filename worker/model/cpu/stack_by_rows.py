"""StackByRows: one stack for steps of few tokens, another one for steps of many."""

from __future__ import annotations

from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.layers.stack import DecoderStack


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
