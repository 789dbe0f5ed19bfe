"""StackByRows: one stack for steps of few tokens, another one for steps of many."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.layers.stack import DecoderStack


class StackByRows:
    """A DecoderStack of two over the same model and pool."""

    def __init__(
        self, few: DecoderStack, many: DecoderStack, many_rows: int, many_threads: int
    ) -> None:
        """`many` computes steps of `many_rows` tokens and more, in which torch has `many_threads`:
        oneDNN computes on torch's threads, and there is but one of them beside our own."""
        self._few = few
        self._many = many
        self._many_rows = many_rows
        self._many_threads = many_threads

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        if metadata.num_tokens < self._many_rows:
            return self._few(token_ids, positions, metadata, rows)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._many_threads)
        try:
            return self._many(token_ids, positions, metadata, rows)
        finally:
            torch.set_num_threads(num_threads)
