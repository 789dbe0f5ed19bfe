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
from worker.model.cpu.library import ATTENTION_BLOCK, NativeKernels
from worker.model.cpu.native_ops import MAX_HEAD_DIM
from worker.model.cpu.native_stack import NativeAttention
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
        self._backend: SdpaAttention | NativeAttention | None = None
        self._next = 0
        self._observed: list[KVLayer] | None = None
        own = weakref.ref(self)  # the interface keeps what is registered for ever

        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            attention = own()
            assert attention is not None, "the model's attention is gone"
            return attention.attend(*args, **kwargs)

        AttentionInterface.register(self.name, attend)

    def is_native(self, block_size: int, dtype: torch.dtype) -> bool:
        """Returns whether the compiled kernels compute the attention of all layers."""
        kept = {call.kept for call in self._calls}
        if len(kept) > 1 or block_size != ATTENTION_BLOCK or dtype is not torch.bfloat16:
            return False
        (layer,) = kept
        return (
            layer.key_dim == layer.value_dim
            and layer.key_dim % 16 == 0
            and layer.key_dim <= MAX_HEAD_DIM
            and all(
                not call.has_sinks
                and call.scores.softcap is None
                and call.scores.reach.chunk is None
                for call in self._calls
            )
        )

    def use(self, pool: KVCachePool, kernels: NativeKernels | None) -> None:
        """Keeps keys and values in `pool` from now on, and attends with `kernels` where they do."""
        scores = [call.scores for call in self._calls]
        if kernels is not None and self.is_native(pool.block_size, pool.storage.dtype):
            self._backend = NativeAttention(pool, kernels, scores)
        else:
            self._backend = SdpaAttention(pool, scores)

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
        if isinstance(self._backend, SdpaAttention):
            self._backend.forward(number, q, k, v, out, s_aux)
        else:
            self._backend.forward(number, _by_token(q), _by_token(k), _by_token(v), out)
        return out[None], None


def _by_token(heads: Tensor) -> Tensor:
    """Returns [T, heads, dim] with each token's heads in one piece, as the kernels read them."""
    is_one_piece = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_one_piece else heads.contiguous()
