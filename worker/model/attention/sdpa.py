"""Reference attention: blocks gathered, then torch's scaled dot product attention.

Runs wherever torch runs, for every dtype, head size and block size; the other backends are measured
against it. Decodes are batched by similar length, prefill chunks run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.model.attention.base import AttentionMetadata
from worker.model.device import to_device
from worker.model.kv_cache import KVCachePool

# A decode group gathers at most this many places, and none of its sequences is shorter than this
# part of the longest: bounds of the gathered copy's size and of its padding.
_MAX_GATHERED_PLACES = 1 << 16
_MIN_FILL = 0.5


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor | None  # [n] batch rows; None: the first n in order
    num_rows: int
    blocks: Tensor  # [n, num_blocks]
    is_padding: Tensor  # [n, places] True past a sequence's end
    shortest: int  # no place before this one is padding


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: int
    end: int
    context_len: int
    blocks: Tensor  # [num_blocks]
    mask: Tensor | None  # [queries, context] True where attended; None: plainly causal


class SdpaAttention:
    """An AttentionBackend over `pool`."""

    def __init__(self, pool: KVCachePool) -> None:
        self._pool = pool
        self._slot_blocks = torch.empty(0)
        self._slot_offsets = torch.empty(0)
        self._decodes: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []

    def prepare(self, metadata: AttentionMetadata) -> None:
        size = self._pool.block_size
        slots = metadata.slots.long()
        self._slot_blocks = torch.div(slots, size, rounding_mode="floor")
        self._slot_offsets = slots % size
        self._decodes = self._group_decodes(metadata)
        self._chunks = []
        start = metadata.num_decodes
        for row in range(metadata.num_decodes, len(metadata.query_lens)):
            end = start + metadata.query_lens[row]
            self._chunks.append(self._chunk(metadata, row, start, end))
            start = end

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys[self._slot_blocks, self._slot_offsets] = k
        values[self._slot_blocks, self._slot_offsets] = v
        for group in self._decodes:
            _attend_decodes(group, q, keys, values, out)
        for chunk in self._chunks:
            _attend_chunk(chunk, q, k, v, keys, values, out)

    def _group_decodes(self, metadata: AttentionMetadata) -> list[_DecodeGroup]:
        size = self._pool.block_size
        lens = metadata.context_lens[: metadata.num_decodes]
        groups = []
        for rows in group_by_length(lens, size):
            num_blocks = -(-max(lens[row] for row in rows) // size)
            index = None
            if rows != list(range(len(rows))):
                index = to_device(np.array(rows, dtype=np.int64), metadata.slots.device)
            table, seq_lens = metadata.block_table, metadata.seq_lens
            table = table[: len(rows)] if index is None else table.index_select(0, index)
            seq_lens = seq_lens[: len(rows)] if index is None else seq_lens.index_select(0, index)
            places = torch.arange(num_blocks * size, device=table.device, dtype=torch.int32)
            padding = places[None, :] >= seq_lens[:, None]
            blocks, shortest = table[:, :num_blocks].long(), min(lens[row] for row in rows)
            groups.append(_DecodeGroup(index, len(rows), blocks, padding, shortest))
        return groups

    def _chunk(self, metadata: AttentionMetadata, row: int, start: int, end: int) -> _Chunk:
        context_len = metadata.context_lens[row]
        num_blocks = -(-context_len // self._pool.block_size)
        mask = None
        if context_len != end - start:
            places = torch.arange(context_len, device=metadata.slots.device)
            mask = places[None, :] <= places[context_len - (end - start) :, None]
        blocks = metadata.block_table[row, :num_blocks].long()
        return _Chunk(start, end, context_len, blocks, mask)


def group_by_length(lens: tuple[int, ...], block_size: int) -> list[list[int]]:
    """Returns rows in groups of similar length; a batch that fits in one group keeps its order."""
    order = sorted(range(len(lens)), key=lambda row: -lens[row])
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        places = -(-longest // block_size) * block_size
        full = groups and (len(groups[-1]) + 1) * places > _MAX_GATHERED_PLACES
        if not groups or full or lens[row] < _MIN_FILL * longest:
            groups.append([])
            longest = lens[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _attend_decodes(
    group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    """Computes the decodes of a group: reads q [T, heads, head_dim], writes their rows of `out`.

    `keys` and `values` are [blocks, block_size, kv_heads, head_dim]. The query heads of one key
    head become rows of one matrix: no key is read twice.
    """
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    rows = slice(0, group.num_rows) if group.rows is None else group.rows
    queries = q[rows].reshape(group.num_rows, kv_heads, -1, head_dim)
    # Zeros for the places past the end: a NaN that another sequence left there would survive
    # a mask, because 0 * NaN is NaN.
    padding = group.is_padding[:, group.shortest :, None, None]
    gathered_k = keys[group.blocks].flatten(1, 2)
    gathered_v = values[group.blocks].flatten(1, 2)
    gathered_k[:, group.shortest :].masked_fill_(padding, 0)
    gathered_v[:, group.shortest :].masked_fill_(padding, 0)
    attended = functional.scaled_dot_product_attention(
        queries,
        gathered_k.transpose(1, 2),
        gathered_v.transpose(1, 2),
        attn_mask=~group.is_padding[:, None, None, :],
    )
    out[rows] = attended.reshape(group.num_rows, -1, head_dim)


def _attend_chunk(
    chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    """Computes one chunk of a prompt: reads q, k, v [T, heads, head_dim], writes its rows of `out`.

    `keys` and `values` are [blocks, block_size, kv_heads, head_dim]. The groups of query heads
    become the batch, over one copy of the keys.
    """
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    tokens = slice(chunk.start, chunk.end)
    queries = q[tokens].reshape(chunk.end - chunk.start, kv_heads, -1, head_dim)
    queries = queries.permute(2, 1, 0, 3)
    if chunk.mask is None:
        context_k, context_v = k[tokens], v[tokens]
    else:
        context_k = keys[chunk.blocks].flatten(0, 1)[: chunk.context_len]
        context_v = values[chunk.blocks].flatten(0, 1)[: chunk.context_len]
    groups = queries.shape[0]
    attended = functional.scaled_dot_product_attention(
        queries,
        context_k.transpose(0, 1).expand(groups, -1, -1, -1),
        context_v.transpose(0, 1).expand(groups, -1, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
    )
    out[tokens] = attended.permute(2, 1, 0, 3).flatten(1, 2)
