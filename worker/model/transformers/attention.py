"""PagedAttention: one model's attention, called by transformers, over the paged KV cache."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from worker.model.attention.base import AttentionMetadata
from worker.model.attention.sdpa import SdpaAttention
from worker.model.kv_cache import KVCachePool, KVLayer
from worker.model.transformers.probe import AttentionCall


class AttentionMismatch(RuntimeError):
    """A forward pass called its attention otherwise than the probe did."""


class PagedAttention:
    """An attention implementation of transformers, registered under a `name` of its own.

    There is no mask under this name, so transformers makes none. Layers are known by the order in
    which they call: a step begins with `begin` and ends with `end`.
    """

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.name = f"penstock-{id(self):x}"
        self._calls = tuple(calls)
        self._backend: SdpaAttention | None = None
        self._next = 0
        self._observed: list[KVLayer] | None = None
        own = weakref.ref(self)  # the interface keeps what is registered for ever

        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            attention = own()
            assert attention is not None, "the model's attention is gone"
            return attention.attend(*args, **kwargs)

        AttentionInterface.register(self.name, attend)

    def use(self, pool: KVCachePool) -> None:
        """Keeps keys and values in `pool` from now on."""
        self._backend = SdpaAttention(pool, [call.scores for call in self._calls])

    def replace(self, calls: Sequence[AttentionCall]) -> None:
        """Expects these calls from now on."""
        self._calls = tuple(calls)

    @contextlib.contextmanager
    def observed(self) -> Iterator[list[KVLayer]]:
        """Yields a list that gets what each call of a forward pass keeps; nothing is attended."""
        self._observed = []
        try:
            yield self._observed
        finally:
            self._observed = None

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepares a step, before the model's forward pass."""
        assert self._backend is not None, "begin comes after use"
        self._backend.prepare(metadata)
        self._next = 0

    def end(self) -> None:
        """Raises AttentionMismatch unless every layer has called."""
        if self._next != len(self._calls):
            raise AttentionMismatch(
                f"{self._next} calls of the attention in one pass, not {len(self._calls)}"
            )

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Computes as transformers' attention functions do, for a batch that is flat.

        `query` [1, heads, T, key_dim], `key` and `value` [1, kv_heads, T, ...] become [1, T, heads,
        value_dim]. What a layer's window is follows from the probe.
        """
        if self._observed is not None:
            self._observed.append(KVLayer(key.shape[1], key.shape[3], value.shape[3]))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        number = self._next
        self._next += 1
        if number >= len(self._calls) or self._backend is None:
            raise AttentionMismatch(f"more than {len(self._calls)} calls of the attention")
        call = self._calls[number]
        if (
            attention_mask is not None
            or softcap != call.scores.softcap
            or (scaling is not None and scaling != call.scores.scale)
            or (s_aux is not None) != call.has_sinks
        ):
            raise AttentionMismatch(f"call {number} of the attention has other arguments")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = torch.empty(
            q.shape[0], q.shape[1], v.shape[2], dtype=query.dtype, device=query.device
        )
        self._backend.forward(number, q, k, v, out, s_aux)
        return out[None], None
