"""The interfaces that all rooms of the model share: attention, KV cache, decoder stack, shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Multiply = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]
Activation = Literal["silu", "gelu_tanh"]  # of a gate
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step's shape. Tensors are int32 on the model's device; S sequences, T tokens, G groups of
    layers, which have blocks of their own (KVGroups).

    Sequences with one query token come first (`num_decodes` of them). The tuples repeat on the host
    what `cu_q` and `seq_lens` hold on the device, for backends that choose shapes there.
    """

    cu_q: Tensor  # [S + 1] where each sequence's queries begin; the last is T
    seq_lens: Tensor  # [S] keys of each sequence, this step's included
    block_tables: Tensor  # [G, S, max_blocks]; entries that no query reaches are any valid block
    slots: Tensor  # [G, T] where each token's key and value go: block * block_size + offset
    num_decodes: int
    max_query_len: int
    num_tokens: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # seq_lens on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Which keys a query attends to, of those up to its own position."""

    window: int | None = None  # that many last positions, its own included
    chunk: int | None = None  # those of its own chunk: positions are cut into chunks of this size

    def first(self, position: int) -> int:
        """Returns the first key's position for the query at `position`."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns True where a query attends to a key, by their positions, which broadcast."""
        mask = keys <= queries
        if self.window is not None:
            mask = mask & (keys > queries - self.window)
        if self.chunk is not None:
            mask = mask & (
                torch.div(keys, self.chunk, rounding_mode="floor")
                == torch.div(queries, self.chunk, rounding_mode="floor")
            )
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScores:
    """How one layer's attention turns queries and keys into weights."""

    scale: float | None = None  # of a query times a key; None: key_dim ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    reach: Reach = Reach()


class AttentionBackend(Protocol):
    """Causal attention of ragged queries. One contract suite runs over every implementation.

    Heads are grouped: query head h reads key head h // (heads / kv_heads). Places of a block past
    the sequence's end may hold anything, NaN included, and never show in the output; so may blocks
    wholly before the first place that its queries of this step reach.
    """

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Prepares a step, before its first layer. Never waits for the device."""
        ...

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes k [T, kv_heads, key_dim] and v [..., value_dim], which may be strided views, to
        their slots. They stay as they are until the layer has attended."""
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Fills `out` [T, heads, value_dim], contiguous, for q [T, heads, key_dim], which may be a
        strided view. The layer's keys and values of this step have been stored."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one layer keeps of a token: `num_kv_heads` keys [key_dim] and values [value_dim]."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that a query reaches at most, its own included; None: all

    @property
    def numbers(self) -> int:
        """Numbers of one token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KeepsKV(Protocol):
    """The part of a model's configuration that a pool needs."""

    @property
    def kv_layers(self) -> Sequence[KVLayer]: ...


# Computes all rows of a step as a DecoderStack does, [num_tokens, hidden], in the last argument.
RunInto = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], None]


class DecoderStack(Protocol):
    """A model's layers over one KV cache, from token ids to final hidden states.

    Integer tensors are int32.
    """

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        """Returns final hidden states [N, hidden] of `rows` [N], valid until the next call.

        `token_ids` and `positions` are [num_tokens].

        Rows come in order: of a sequence its last token in this step, or any run of its tokens.
        Writes the keys and values of all tokens to their slots.
        """
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """The part [start, start + size) of `whole` that a rank has."""

    start: int
    size: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> Share:
        return cls(0, whole, whole)

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def is_all(self) -> bool:
        return self.size == self.whole

    def times(self, count: int) -> Share:
        """Returns the share of `count` times as many: of features, for a share of heads."""
        return Share(self.start * count, self.size * count, self.whole * count)
