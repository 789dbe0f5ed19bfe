"""PagedAttention: one model's attention, called by transformers, over the paged KV cache."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from worker.engines.transformers.probe import AttentionCall
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionMetadata, LayerScores
from worker.model.cpu.library import ATTENTION_BLOCK, NativeKernels
from worker.model.cpu.native_ops import MAX_HEAD_DIM
from worker.model.cpu.native_stack import NativeAttention
from worker.model.kv_cache import KVCachePool
from worker.model.layers.ops import HeadNorm

if TYPE_CHECKING:
    from worker.model.cuda.attention import TritonAttention

# q [T, heads, key_dim], k and v [T, kv_heads, ...] to [T, heads, value_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionMismatch(RuntimeError):
    """A forward pass called its attention otherwise than the probe did."""


class Rotations:
    """Cosines and sines as operations take them. Layers share what they are given."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []

    def of(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns [T, 1, dim / 2] each of cosines and sines [1, T, dim], whose halves are alike."""
        for given, halves in self._known:
            if given is embeddings:
                return halves
        cos, sin = (part[0, :, None, : part.shape[-1] // 2].contiguous() for part in embeddings)
        # Some layers of a step may have others.
        self._known = [(embeddings, (cos, sin)), *self._known[:1]]
        return cos, sin

    def clear(self) -> None:
        self._known = []


class PagedAttention:
    """An attention implementation of transformers, registered under a `name` of its own.

    There is no mask under this name, so transformers makes none. Layers are known by the order in
    which they call: a step begins with `begin` and ends with `end`.
    """

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.name = f"penstock-{id(self):x}"
        self._calls = tuple(calls)
        self._backend: SdpaAttention | TritonAttention | NativeAttention | None = None
        self._rotates: _RotatesInto | None = None  # the backend's own, where it has that
        self.rotations = Rotations()
        self._next = 0
        self._stand_in: Attend | None = None
        self.is_away = False
        own = weakref.ref(self)  # the interface keeps registered functions

        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            attention = own()
            assert attention is not None, "the model's attention is gone"
            return attention.attend(*args, **kwargs)

        AttentionInterface.register(self.name, attend)

    def is_native(self, block_size: int, dtype: torch.dtype) -> bool:
        """Returns whether the compiled kernels compute the attention of all layers."""
        kept = {replace(call.kept, window=None) for call in self._calls}  # windows may differ
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

    def use(self, pool: KVCachePool, kernels: NativeKernels | None, uses_triton: bool) -> None:
        """Keeps keys and values in `pool` from now on.

        Attends with `kernels` where they can, or with those in Triton.
        """
        scores = [call.scores for call in self._calls]
        if uses_triton:
            # Here and not above: it needs Triton, which a CPU's build of PyTorch lacks.
            from worker.model.cuda.attention import TritonAttention
            from worker.model.cuda.layers import rotate_and_store

            self._backend = TritonAttention(pool, scores)
            self._rotates = _RotatesInto(pool, rotate_and_store)
        elif kernels is not None and self.is_native(pool.block_size, pool.storage.dtype):
            self._backend = NativeAttention(pool, kernels, scores)
        else:
            self._backend = SdpaAttention(pool, scores)

    def release(self) -> None:
        """Forgets the pool, and what the last step was given."""
        self._backend = self._rotates = None
        self.rotations.clear()

    def replace(self, calls: Sequence[AttentionCall]) -> None:
        """Expects these calls from now on."""
        self._calls = tuple(calls)

    @contextlib.contextmanager
    def replaced(self, attend: Attend) -> Iterator[None]:
        """Calls `attend` instead of this attention, however often."""
        self._stand_in = attend
        try:
            yield
        finally:
            self._stand_in = None

    @contextlib.contextmanager
    def away(self, network: PreTrainedModel) -> Iterator[None]:
        """Leaves the attention to the network's own code, over tokens of one sequence."""
        self.is_away = True
        network.set_attn_implementation("eager")
        try:
            yield
        finally:
            network.set_attn_implementation(self.name)
            self.is_away = False

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepares a step, before the model's forward pass."""
        assert self._backend is not None, "begin comes after use"
        self._backend.prepare(metadata)
        if self._rotates is not None:
            self._rotates.begin(metadata)
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
        if self._stand_in is None:
            self._check(attention_mask, scaling, softcap, s_aux)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.attend_rows(q, k, v, s_aux)[None], None

    def scores(self, number: int) -> LayerScores:
        """Returns how a call weighs."""
        return self._calls[number].scores

    def next_layers(self, count: int) -> tuple[NativeAttention, int] | None:
        """Returns the kernels' attention and the first of the next `count` calls, which its caller
        computes; None where `attend_rows` is to be called."""
        if self._stand_in is not None or not isinstance(self._backend, NativeAttention):
            return None
        return self._backend, self._take(count)

    def _take(self, count: int) -> int:
        """Returns the number of the first of that many calls. Raises AttentionMismatch."""
        number = self._next
        self._next += count
        if self._next > len(self._calls):
            raise AttentionMismatch(f"more than {len(self._calls)} calls of the attention")
        return number

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None = None) -> Tensor:
        """Returns [T, heads, value_dim] of q [T, heads, key_dim], k and v [T, kv_heads, ...]."""
        if self._stand_in is not None:
            return self._stand_in(q, k, v)
        number = self._take(1)
        backend = self._backend
        assert backend is not None, "a call comes after use"
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        if isinstance(backend, NativeAttention):
            backend.store(number, _by_token(k), _by_token(v))
            backend.attend(number, _by_token(q), out)
        else:
            backend.store(number, _by_place(k), _by_place(v))
            backend.attend(number, _by_place(q), out, s_aux)
        return out

    def attend_unrotated(
        self,
        qkv: Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor | None:
        """Does what Ops.rotate and then `attend_rows` do, in fewer launches; None where the caller
        is to call these. Overwrites `qkv`."""
        rotates, backend = self._rotates, self._backend
        if self._stand_in is not None or rotates is None or backend is None:
            return None
        if norm is not None and (norm.query.eps, norm.query.adds_one) != (
            norm.key.eps,
            norm.key.adds_one,
        ):
            return None
        number = self._take(1)
        q = rotates(number, qkv, norm, cos, sin)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        assert q.shape[1] == num_heads, "the pool keeps other heads"
        backend.attend(number, q, out)
        return out

    def has_sinks(self, number: int) -> bool:
        """Returns whether a call has scores of a key without a value."""
        return self._calls[number].has_sinks

    def _check(
        self,
        attention_mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        s_aux: Tensor | None,
    ) -> None:
        """Raises AttentionMismatch where the next call is not as the probe saw it."""
        if self._next >= len(self._calls):
            return  # attend_rows raises
        call = self._calls[self._next]
        if (
            attention_mask is not None
            or softcap != call.scores.softcap
            or (scaling is not None and scaling != call.scores.scale)
            or (s_aux is not None) != call.has_sinks
        ):
            raise AttentionMismatch(f"call {self._next} of the attention has other arguments")


class _RotatesInto:
    """Rotates queries and keys of a layer, and keeps keys and values in the pool, in one launch."""

    def __init__(self, pool: KVCachePool, rotate_and_store: Callable[..., Tensor]) -> None:
        self._pool = pool
        self._rotate_and_store = rotate_and_store
        self._slots = self._rows = torch.empty(0)

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepares a step."""
        self._slots = metadata.slots
        # The cosines have a row for each token.
        self._rows = torch.arange(
            metadata.num_tokens, dtype=torch.int32, device=metadata.slots.device
        )

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        norm: HeadNorm | None,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Returns the queries [tokens, heads, dim]; cos and sin are [tokens, 1, dim / 2]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        slots = self._slots[self._pool.groups.of_layers[layer]]
        return self._rotate_and_store(qkv, self._rows, slots, (cos, sin), norm, keys, values)


def _by_place(heads: Tensor) -> Tensor:
    """Returns [T, heads, dim] whose last dimension is contiguous."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _by_token(heads: Tensor) -> Tensor:
    """Returns [T, heads, dim] with each token's heads in one piece, as the kernels read them."""
    is_one_piece = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_one_piece else heads.contiguous()
