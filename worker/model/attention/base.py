"""AttentionBackend: how queries meet the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step's shape. Tensors are int32 on the model's device; S sequences, T tokens.

    Sequences with one query token come first (`num_decodes` of them). The tuples repeat on the host
    what `cu_q` and `seq_lens` hold on the device, for backends that choose shapes there.
    """

    cu_q: Tensor  # [S + 1] where each sequence's queries begin; the last is T
    seq_lens: Tensor  # [S] keys of each sequence, this step's included
    block_table: Tensor  # [S, max_blocks]; entries past a sequence's end are 0
    slots: Tensor  # [T] where each token's key and value go: block * block_size + offset
    num_decodes: int
    max_query_len: int
    num_tokens: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # seq_lens on the host


class AttentionBackend(Protocol):
    """Causal attention of ragged queries. One contract suite runs over every implementation.

    Heads are grouped: query head h reads key head h // (heads / kv_heads). Scores are scaled by
    head_dim ** -0.5. Places of a block past the sequence's end may hold anything, NaN included, and
    never show in the output.
    """

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Prepares a step, before its first layer. Never waits for the device."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes k and v [T, kv_heads, head_dim] to their slots, attends, fills `out`.

        q and out are [T, heads, head_dim]; out is contiguous, the others may be strided views.
        """
        ...
